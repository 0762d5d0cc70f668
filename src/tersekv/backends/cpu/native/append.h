// Appends: loads, norms, rotates, quantizes and stores rows. Every step is one correctly rounded fp32 operation, but the
// norm is computed in fp64 and rounded once.
#pragma once

#include "numbers.h"
#include "thread_pool.h"
#include "row_transform.h"

namespace {

struct TokenSlot {
    int64_t page, entry;  // page < 0: the token is dropped
    int64_t position;     // row of the rotary table; -1: none
    bool skipped;         // by a negative index
};

struct AppendRun {
    const Append& c;
    Addresses at;
    int64_t threads;
    const int64_t longest;  // columns of the longest row

    static int64_t columns(const RowWrite& s) { return s.first_columns + s.second_columns; }

    // Appends the rows of thread `mine`: those whose slot hashes to it, so that of two tokens with one slot the last is
    // written, and the queries of every n-th token.
    static void append_rows_of_thread(void* context, int64_t i_thread) {
        const AppendRun& self = *static_cast<AppendRun*>(context);
        float* x = reinterpret_cast<float*>(cached_buffer(FOR_ITEM, self.longest * 8 + 256));
        if (x == nullptr) return;
        uint8_t* codes = reinterpret_cast<uint8_t*>(x + self.longest);
        for (int64_t t = 0; t < self.c.tokens; t++) {
            TokenSlot to = self.find_slot_and_rope_position(t);
            uint64_t slot = static_cast<uint64_t>(to.page) * self.c.page_size + to.entry;
            bool writes = to.page >= 0 && static_cast<int64_t>((slot * 0x9E3779B97F4A7C15ull >> 32) % self.threads) == i_thread;
            for (int64_t i = 0; i < self.c.num_row_writes; i++) {
                const RowWrite& s = self.c.row_writes[i];
                if (s.cached ? writes : t % self.threads == i_thread)
                    for (int64_t h = 0; h < s.heads; h++) self.append_or_cast_row(s, t, h, to, x, codes);
            }
        }
    }

    TokenSlot find_slot_and_rope_position(int64_t token) const {
        TokenSlot to = {-1, 0, -1, false};
        if (c.cos_sin >= 0) {
            to.position = read_index(at[c.positions.tensor], c.positions.dtype, token);
            if (to.position < 0 || to.position >= c.max_position) to.position = -1;
        }
        if (c.page_size == 0) return to;  // no cache
        if (c.slots.tensor >= 0) {
            int64_t slot = read_index(at[c.slots.tensor], c.slots.dtype, token);
            to.skipped = slot < 0;
            if (slot >= 0 && slot / c.page_size < c.num_pages) to.page = slot / c.page_size, to.entry = slot % c.page_size;
        } else {
            set_slot_from_kv_indices(token, to);
        }
        if (c.cos_sin >= 0 && to.position < 0) to.page = -1;
        return to;
    }

    void set_slot_from_kv_indices(int64_t token, TokenSlot& slot) const {
        int64_t b = read_index(at[c.batch.tensor], c.batch.dtype, token);
        int64_t position = read_index(at[c.kv_positions.tensor], c.kv_positions.dtype, token);
        slot.skipped = b < 0;
        if (b < 0 || b >= c.num_requests || position < 0) return;
        int64_t start = read_index(at[c.indptr.tensor], c.indptr.dtype, b);
        int64_t stop = read_index(at[c.indptr.tensor], c.indptr.dtype, b + 1);
        int64_t remaining = position / c.page_size;
        if (start < 0 || stop <= start || remaining >= stop - start || remaining >= c.num_indices - start) return;
        int64_t page = read_index(at[c.indices.tensor], c.indices.dtype, start + remaining);
        if (page >= 0 && page < c.num_pages) slot.page = page, slot.entry = position % c.page_size;
    }

    float multiplier_from_value_or_scale_tensor(const RowWrite& row_write, int64_t head) const {
        if (row_write.multiplier.tensor < 0) return static_cast<float>(row_write.multiplier.value);
        float given = load<float>(at[row_write.multiplier.tensor] + 4 * head * row_write.multiplier.stride);
        return c.scales_quantize ? given : 1.0f / given;
    }

    void append_or_cast_row(const RowWrite& row_write, int64_t token, int64_t head, const TokenSlot& slot, float* row_buffer, uint8_t* code_buffer) const {
        int64_t n = columns(row_write);
        if (!row_write.cached) {
            char* out = at[row_write.out.tensor] + token * row_write.out.strides[0] + head * row_write.out.strides[1];
            if ((c.cos_sin >= 0 && slot.position < 0) || (c.zero_padding && slot.skipped)) {
                for (int64_t i = 0; i < n; i++) row_buffer[i] = 0.0f;
            } else {
                load_and_transform_row(row_write, token, head, slot, row_buffer);
                float by = multiplier_from_value_or_scale_tensor(row_write, head);
                for (int64_t i = 0; i < n; i++) row_buffer[i] *= by;
            }
            float scale = row_write.scale_kind == INDEX_SCALE ? divide_by_pow2_scale_and_return_scale(row_buffer, n) : 1.0f;
            if (row_write.weights.out.tensor >= 0) store_head_weight(row_write.weights, token, head, scale);
            return write_floats(row_buffer, row_write.out_dtype, out, n);
        }
        auto address_in = [&](const StridedTensor& p) {
            return at[p.tensor] + slot.page * p.strides[0] + slot.entry * p.strides[1] + head * p.strides[2];
        };
        char* out = address_in(row_write.out);
        if (row_write.scale_kind == TENSOR_SCALE && c.dtype == row_write.out_dtype) {  // fp8 codes: copied
            memcpy(out, at[row_write.first.tensor] + token * row_write.first.strides[0] + head * row_write.first.strides[1], row_write.first_columns);
            return;
        }
        load_and_transform_row(row_write, token, head, slot, row_buffer);
        switch (row_write.scale_kind) {
            case NO_SCALE: return write_floats(row_buffer, row_write.out_dtype, out, n);
            case TENSOR_SCALE: {
                float by = multiplier_from_value_or_scale_tensor(row_write, head);
                for (int64_t i = 0; i < n; i++) row_buffer[i] *= by;
                return write_floats(row_buffer, row_write.out_dtype, out, n);
            }
            case ROW_SCALE:
                if (row_write.out_dtype == INT4) return store(address_in(row_write.scales), quantize_int4_row_and_return_scale_zero_word(row_buffer, n, code_buffer, out));
                return store(address_in(row_write.scales), quantize_row_by_abs_max_and_return_scale(row_buffer, n, row_write.out_dtype, out));
            case BLOCK_SCALE: return quantize_and_store_nvfp4_row(row_write, head, row_buffer, n, code_buffer, out, address_in(row_write.scales));
            case UE8M0_SCALE: return quantize_and_store_ue8m0_row_with_bf16_tail(row_write, row_buffer, n, out, address_in(row_write.scales));
            case INDEX_SCALE: return quantize_and_store_index_row(row_write, row_buffer, n, out, address_in(row_write.scales));
            case GROUP_SCALE: return quantize_and_store_row_pow2_scale_per_128(row_buffer, n, row_write.out_dtype, out, address_in(row_write.scales));
        }
    }

    void load_and_transform_row(const RowWrite& row_write, int64_t token, int64_t head, const TokenSlot& slot, float* out) const {
        read_floats(at[row_write.first.tensor] + token * row_write.first.strides[0] + head * row_write.first.strides[1], c.dtype, out, row_write.first_columns);
        if (row_write.second_columns > 0)
            read_floats(at[row_write.second.tensor] + token * row_write.second.strides[0] + head * row_write.second.strides[1], c.dtype,
                        out + row_write.first_columns, row_write.second_columns);
        int64_t n = columns(row_write);
        if (row_write.norm.weight >= 0) apply_layer_norm(row_write.norm, out, n), round_floats(out, row_write.round_dtype, n);
        if (row_write.rotated) apply_rope(out + row_write.rotary_column, slot.position), round_floats(out, row_write.round_dtype, n);
        divide_by_channel_scales_and_rotate(row_write.transform, at, head, out, n);
        round_floats(out, row_write.round_dtype, n);
    }

    // LayerNorm of a row whose columns are a multiple of 8.
    void apply_layer_norm(const LayerNorm& norm, float* x, int64_t n) const {
        double sums[8] = {}, squares[8] = {}, total = 0, total_of_squares = 0;
        for (int64_t i = 0; i < n; i += 8)
            for (int64_t j = 0; j < 8; j++) sums[j] += x[i + j];
        for (double sum : sums) total += sum;
        double mean = total / static_cast<double>(n);
        for (int64_t i = 0; i < n; i += 8)
            for (int64_t j = 0; j < 8; j++) {
                double y = x[i + j] - mean;
                squares[j] += y * y;
            }
        for (double square : squares) total_of_squares += square;
        double deviation = __builtin_sqrt(total_of_squares / static_cast<double>(n) + static_cast<float>(norm.epsilon));
        float weight[8], bias[8];
        auto read_8 = [&](int64_t tensor, int64_t dtype, int64_t i, float* out) { read_floats(at[tensor] + i * (dtype == F32 ? 4 : 2), dtype, out, 8); };
        for (int64_t i = 0; i < n; i += 8) {
            read_8(norm.weight, norm.weight_dtype, i, weight);
            read_8(norm.bias, norm.bias_dtype, i, bias);
            for (int64_t j = 0; j < 8; j++) x[i + j] = static_cast<float>((x[i + j] - mean) / deviation * weight[j] + bias[j]);
        }
    }

    void store_head_weight(const HeadWeights& weights, int64_t token, int64_t head, float row_scale) const {
        float weight = 1.0f;
        const StridedTensor &in = weights.input, &out = weights.out;
        if (in.tensor >= 0) read_floats(at[in.tensor] + token * in.strides[0] + head * in.strides[1], weights.dtype, &weight, 1);
        store(at[out.tensor] + token * out.strides[0] + head * out.strides[1], weight * static_cast<float>(weights.scale) * row_scale);
    }

    // RoPE: rotates pairs by the angles of a position: two products and a sum, each rounded.
    void apply_rope(float* x, int64_t position) const {
        const char* cos = at[c.cos_sin] + position * c.cos_sin_stride;
        int64_t half = c.rotary / 2;
        const char* sin = cos + 4 * half;
        int64_t step = c.interleaved ? 2 : 1, away = c.interleaved ? 1 : half;
        for (int64_t i = 0; i < half; i++) {
            float *a = x + i * step, *b = a + away, first = *a, second = *b;
            float cos_i = load<float>(cos + 4 * i), sin_i = load<float>(sin + 4 * i);
            *a = first * cos_i - second * sin_i;
            *b = second * cos_i + first * sin_i;
        }
    }

    // Returns the largest magnitude, NaN ignored.
    static float abs_max_ignoring_nan(const float* x, int64_t n) {
        uint32_t top = 0;
        for (int64_t i = 0; i < n; i++) {
            uint32_t a = bits(x[i]) & 0x7FFFFFFF;
            a = a > INFINITE ? 0 : a;
            top = a > top ? a : top;
        }
        return from_bits(top);
    }

    static float quantize_row_by_abs_max_and_return_scale(float* x, int64_t n, int64_t dtype, char* out) {
        float scale = abs_max_ignoring_nan(x, n) / (dtype == INT8 ? 127.0f : dtype == E4M3 ? 448.0f : 57344.0f);
        scale = scale > 1e-6f ? scale : 1e-6f;
        float by = 1.0f / scale;
        for (int64_t i = 0; i < n; i++) x[i] *= by;
        if (dtype == INT8)
            for (int64_t i = 0; i < n; i++) store(out + i, to_int8(x[i]));
        else
            write_floats(x, dtype, out, n);
        return scale;
    }

    void quantize_and_store_nvfp4_row(const RowWrite& row_write, int64_t head, float* x, int64_t n, uint8_t* codes, char* out, char* scales) const {
        float by = multiplier_from_value_or_scale_tensor(row_write, head), whole;
        if (row_write.multiplier.tensor >= 0 && !c.scales_quantize)
            whole = load<float>(at[row_write.multiplier.tensor] + 4 * head * row_write.multiplier.stride);
        else
            whole = 1.0f / by;
        for (int64_t i = 0; i < n; i += 16) {
            uint8_t scale = to_e4m3(abs_max_ignoring_nan(x + i, 16) / 6.0f * by);
            store(scales + i / 16, scale);
            float value = E4M3_VALUES.of[scale], inverse = 1.0f / (value * whole);
            for (int64_t j = i; j < i + 16; j++) codes[j] = to_e2m1(x[j] * inverse);
            if (value == 0.0f) memset(codes + i, 0, 16);
        }
        pack_and_store_4_bit(codes, n, out);
    }

    static void pack_and_store_4_bit(const uint8_t* codes, int64_t n, char* out) {
        for (int64_t i = 0; i < n / 2; i++) store(out + i, static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4));
    }

    // Returns the stored scale, with the zero point in its four lowest bits.
    float quantize_int4_row_and_return_scale_zero_word(const float* x, int64_t n, uint8_t* codes, char* out) const {
        float least = c.widen ? 0.0f : -NEGATIVE_INFINITY, most = c.widen ? 0.0f : NEGATIVE_INFINITY;
        for (int64_t i = 0; i < n; i++) {  // NaN is ignored
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
        }
        float scale = (most - least) / 15.0f;
        scale = scale > 1e-6f ? scale : 1e-6f;
        uint8_t zero = to_int4(-least / scale);
        float by = 1.0f / scale, middle = zero;
        for (int64_t i = 0; i < n; i++) {
            float y = x[i] * by;
            codes[i] = to_int4((y == y ? y : 0.0f) + middle);
        }
        pack_and_store_4_bit(codes, n, out);
        return from_bits((bits(scale) & ~15u) | zero);
    }

    static float next_power_of_two(float x) { return from_bits((bits(x) + 0x007FFFFF) & 0x7F800000); }

    // Divides numbers by the power of two that brings the largest magnitude into the range of e4m3.
    static float divide_by_pow2_scale_and_return_scale(float* x, int64_t n) {
        float most = abs_max_ignoring_nan(x, n), scale = next_power_of_two((most > 1e-4f ? most : 1e-4f) / 448.0f);
        float by = 1.0f / scale;
        for (int64_t i = 0; i < n; i++) x[i] *= by;
        return scale;
    }

    // The last scale is of the columns that are left.
    static void quantize_and_store_index_row(const RowWrite& row_write, float* x, int64_t n, char* out, char* scales) {
        for (int64_t i = 0; i < n; i += row_write.width) {
            int64_t count = n - i < row_write.width ? n - i : row_write.width;
            store(scales + i / row_write.width * 4, divide_by_pow2_scale_and_return_scale(x + i, count));
        }
        write_floats(x, row_write.out_dtype, out, n);
    }

    // Exponents of scales, zeros behind them; the last columns of a row stay in bf16, behind its codes.
    static void quantize_and_store_ue8m0_row_with_bf16_tail(const RowWrite& row_write, float* x, int64_t n, char* out, char* scales) {
        int64_t codes = n - row_write.tail;
        memset(scales, 0, row_write.stored_scales);
        for (int64_t i = 0; i < codes; i += row_write.width) {
            float scale = divide_by_pow2_scale_and_return_scale(x + i, row_write.width);
            store(scales + i / row_write.width, static_cast<uint8_t>(bits(scale) >> 23));
        }
        write_floats(x, E4M3, out, codes);
        write_floats(x + codes, BF16, out + codes, row_write.tail);
    }

    static void quantize_and_store_row_pow2_scale_per_128(float* x, int64_t n, int64_t dtype, char* out, char* scales) {
        for (int64_t i = 0; i < n; i += 128) {
            float scale = abs_max_ignoring_nan(x + i, 128) / 448.0f;
            scale = scale > 1e-4f ? scale : 1e-4f;
            scale = next_power_of_two(scale);
            store(scales + i / 128 * 4, scale);
            float by = 1.0f / scale;
            for (int64_t j = i; j < i + 128; j++) x[j] *= by;
        }
        write_floats(x, dtype, out, n);
    }
};

void append(const Append& c, Addresses at, int64_t threads) {
    constexpr int64_t WORTH_A_THREAD = 1 << 15;  // numbers
    int64_t longest = 0, numbers = 0;
    for (int64_t i = 0; i < c.num_row_writes; i++) {
        int64_t n = AppendRun::columns(c.row_writes[i]);
        longest = n > longest ? n : longest;
        numbers += n * c.row_writes[i].heads * c.tokens;
    }
    int64_t wanted = numbers / WORTH_A_THREAD + 1;
    int64_t shares = wanted < threads ? wanted : threads;
    AppendRun run = {c, at, shares, longest};
    parallel_for(shares, shares, threads, AppendRun::append_rows_of_thread, &run);
}

}  // namespace
