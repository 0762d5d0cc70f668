// 4-bit codes for small M: unpacked to bf16 in registers, just before they are multiplied.
//
// Keys are transposed while packed, four bytes of a row at a time, a quarter of their size in bf16: a lane is a key,
// and scores need no sum across a vector. A 16-bit word holds four codes, each looked up by itself. Block scales are
// applied separately: to the scores of each block, and to P before PV.
#pragma once

#include "unpack_bf16.h"
#include "probabilities.h"

#if HAS_BF16_PRODUCTS
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int64_t SPAN = 64;  // columns unpacked together
constexpr int64_t BLOCKS = 2 * SPAN / 16;  // e2m1 blocks processed together: 8 bytes of scales

constexpr __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~0ull : n > 0 ? (1ull << n) - 1 : 0; }

// Permutations of words and bytes for `vpermw` and `vpermb`.
struct NibbleOrders {
    uint16_t tokens[32];
    uint8_t blocks[64], pairs[64];
    constexpr NibbleOrders() : tokens(), blocks(), pairs() {
        for (int p = 0; p < 16; p++)
            for (int token = 0; token < 2; token++) tokens[2 * p + token] = token * 32 + p % 4 * 4 + p / 4;
        for (int i = 0; i < 64; i++) {
            blocks[i] = i % 8 * 8 + i / 8;
            pairs[i] = (i % 16 / 4 * 2 + i % 2) * 8 + i / 16 * 2 + i / 2 % 2;
        }
    }
};
alignas(64) constexpr NibbleOrders NIBBLE_ORDERS;

// Table of codes → bf16. It is stored twice: an index has five bits, of which the highest belongs to the next code.
template <int64_t DTYPE>
struct Nibble {
    __m512i table;
    Nibble() {
        __m512i low = broadcast_16_bytes(DTYPE == INT4 ? INT4_LOW : E2M1_LOW);
        __m512i high = broadcast_16_bytes(DTYPE == INT4 ? INT4_HIGH : E2M1_HIGH);
        table = _mm512_mask_blend_epi64(0xCC, _mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
    }

    // Looks up the n-th code of each word, in out[n].
    INLINE void look_up_4_codes_of_each_16_bit_word(__m512i packed_codes, __m512i (&out)[4]) const {
        out[0] = _mm512_permutexvar_epi16(packed_codes, table);
        out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed_codes, 4), table);
        out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed_codes, 8), table);
        out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed_codes, 12), table);
    }

    // Loads pairs of two rows' codes, 64 columns. The four words of a block lie in four lanes, four blocks side by
    // side.
    INLINE void load_value_pairs(const uint8_t* first, const uint8_t* second, __mmask32 inside, __m512i (&out)[4]) const {
        __m512i a = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(inside, first));
        __m512i b = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(inside, second));
        look_up_4_codes_of_each_16_bit_word(_mm512_permutex2var_epi16(a, _mm512_load_si512(NIBBLE_ORDERS.tokens), b), out);
    }
};

// 64 e4m3 scales → fp32: bytes 4 i to 4 i + 3 of each lane go to the i-th vector.
INLINE void decode_64_e4m3_scales_in_unpack_order(__m512i codes, const CodeToBf16Table<E4M3>& table, float* out) {
    LowAndHighBytes look = table.bf16_bytes_of(codes);
    __m512i zero = _mm512_setzero_si512();
    __m512i low = _mm512_unpacklo_epi8(look.low, look.high), high = _mm512_unpackhi_epi8(look.low, look.high);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(zero, low));
    _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi16(zero, low));
    _mm512_storeu_si512(out + 32, _mm512_unpacklo_epi16(zero, high));
    _mm512_storeu_si512(out + 48, _mm512_unpackhi_epi16(zero, high));
}

// Copies the scales of BLOCKS blocks of a token, 8 bytes; past the row's end they are 0 and not read.
INLINE void copy_8_block_scales_of_token(const Rows& scale_rows, int64_t token, int64_t first_block, int64_t blocks_per_row, uint64_t* out) {
    const uint8_t* row = scale_rows.of(token < scale_rows.count ? token : scale_rows.count - 1) + first_block;
    __mmask16 inside = static_cast<__mmask16>(first_bytes(blocks_per_row - first_block) & 0xFF);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_maskz_loadu_epi8(inside, row));
    scale_rows.ahead->prefetch_line();
}

// Loads the block scales of a tile's keys, [block, key].
inline void load_block_scales_transposed(const Rows& scale_rows, int64_t first_block, int64_t blocks_per_row, float (&out)[BLOCKS][BLOCK_N]) {
    alignas(64) uint64_t raw[BLOCK_N];
    // In the order that leaves keys in order after `decode_64_e4m3_scales_in_unpack_order`.
    for (int64_t t = 0; t < BLOCK_N; t++) copy_8_block_scales_of_token(scale_rows, t, first_block, blocks_per_row, raw + t / 4 % 4 * 16 + t / 16 * 4 + t % 4);
    __m512i a[8];
    const CodeToBf16Table<E4M3> table;
    const __m512i order = _mm512_load_si512(NIBBLE_ORDERS.blocks);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        __m512i x = _mm512_permutexvar_epi8(order, _mm512_load_si512(raw + 8 * i));
        __m512i y = _mm512_permutexvar_epi8(order, _mm512_load_si512(raw + 8 * i + 8));
        a[i] = _mm512_unpacklo_epi64(x, y), a[i + 1] = _mm512_unpackhi_epi64(x, y);
    }
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
        __m512i p = _mm512_shuffle_i64x2(a[odd], a[2 + odd], 0x88), q = _mm512_shuffle_i64x2(a[odd], a[2 + odd], 0xDD);
        __m512i r = _mm512_shuffle_i64x2(a[4 + odd], a[6 + odd], 0x88), s = _mm512_shuffle_i64x2(a[4 + odd], a[6 + odd], 0xDD);
        decode_64_e4m3_scales_in_unpack_order(_mm512_shuffle_i64x2(p, r, 0x88), table, out[odd]);
        decode_64_e4m3_scales_in_unpack_order(_mm512_shuffle_i64x2(q, s, 0x88), table, out[2 + odd]);
        decode_64_e4m3_scales_in_unpack_order(_mm512_shuffle_i64x2(p, r, 0xDD), table, out[4 + odd]);
        decode_64_e4m3_scales_in_unpack_order(_mm512_shuffle_i64x2(q, s, 0xDD), table, out[6 + odd]);
    }
}

// Transposes rows of 16 keys from byte `byte` on, four bytes per key and vector; past a row's end 0 and not read.
inline void load_and_transpose_16_keys(const Rows& rows, int64_t first_key, int64_t first_byte, __mmask64 byte_mask, uint32_t (&out)[16][BLOCK_N]) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        a[i] = _mm512_maskz_loadu_epi8(byte_mask, rows.of(first_key + i < rows.count ? first_key + i : rows.count - 1) + first_byte);
        rows.ahead->prefetch_line();
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Now lane l of a[4 k + j] is word 4 l + j of the keys from 4 k on.
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i p = _mm512_shuffle_i64x2(a[j], a[4 + j], 0x88), q = _mm512_shuffle_i64x2(a[j], a[4 + j], 0xDD);
        __m512i r = _mm512_shuffle_i64x2(a[8 + j], a[12 + j], 0x88), s = _mm512_shuffle_i64x2(a[8 + j], a[12 + j], 0xDD);
        _mm512_storeu_si512(out[j] + first_key, _mm512_shuffle_i64x2(p, r, 0x88));
        _mm512_storeu_si512(out[4 + j] + first_key, _mm512_shuffle_i64x2(q, s, 0x88));
        _mm512_storeu_si512(out[8 + j] + first_key, _mm512_shuffle_i64x2(p, r, 0xDD));
        _mm512_storeu_si512(out[12 + j] + first_key, _mm512_shuffle_i64x2(q, s, 0xDD));
    }
}

// QK of 16 × VECTORS keys over up to 128 columns.
template <int64_t DTYPE, int ROWS, int VECTORS>
INLINE void accumulate_qk_of_transposed_4_bit_keys(const Nibble<DTYPE>& code_table, const uint32_t* transposed_key_words,
                                                   const float* e2m1_block_scales, int64_t num_4_byte_words,
                                                   const uint32_t* query_bf16_pairs, int64_t query_stride_in_pairs,
                                                   bool accumulate, float* out) {
    __m512 total[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS * VECTORS; i++)
        total[i / VECTORS][i % VECTORS] =
            accumulate ? _mm512_loadu_ps(out + i / VECTORS * BLOCK_N + i % VECTORS * W) : _mm512_setzero_ps();
    for (int64_t w = 0; w < num_4_byte_words; w += 2, transposed_key_words += 2 * BLOCK_N, query_bf16_pairs += 8, e2m1_block_scales += BLOCK_N) {
        __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS * VECTORS; i++)
            sum[i / VECTORS][i % VECTORS] = DTYPE == E2M1 ? _mm512_setzero_ps() : total[i / VECTORS][i % VECTORS];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512i x[VECTORS][4];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) code_table.look_up_4_codes_of_each_16_bit_word(_mm512_loadu_si512(transposed_key_words + half * BLOCK_N + v * W), x[v]);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    __m512bh q = (__m512bh)_mm512_set1_epi32(static_cast<int>(query_bf16_pairs[r * query_stride_in_pairs + half * 4 + n]));
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], q, (__m512bh)x[v][n]);
                }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS * VECTORS; i++) {
            __m512 &to = total[i / VECTORS][i % VECTORS], x = sum[i / VECTORS][i % VECTORS];
            to = DTYPE == E2M1 ? _mm512_fmadd_ps(x, _mm512_loadu_ps(e2m1_block_scales + i % VECTORS * W), to) : x;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS * VECTORS; i++)
        _mm512_storeu_ps(out + i / VECTORS * BLOCK_N + i % VECTORS * W, total[i / VECTORS][i % VECTORS]);
}

// QK: scores of a tile for queries [ROWS, columns]; past the tile's end the last key is repeated.
template <int64_t DTYPE, int ROWS>
void compute_scores_4_bit(const Rows& rows, const Rows& e2m1_block_scales, int64_t columns, const uint32_t* queries, float* out) {
    constexpr int VECTORS = ROWS <= 2 ? 4 : 8 / ROWS;
    alignas(64) uint32_t words[16][BLOCK_N];
    alignas(64) float by_block[BLOCKS][BLOCK_N];
    const Nibble<DTYPE> nibble;
    int64_t units = round_up(columns, SPAN) / 2;
    for (int64_t c = 0; c < columns; c += 2 * SPAN) {
        if (DTYPE == E2M1) load_block_scales_transposed(e2m1_block_scales, c / 16, columns / 16, by_block);
        int64_t remaining = columns - c < 2 * SPAN ? columns - c : 2 * SPAN;
        for (int64_t t = 0; t < rows.count; t += VECTORS * W) {
            for (int64_t v = 0; v < VECTORS; v++) load_and_transpose_16_keys(rows, t + v * W, c / 2, first_bytes(remaining / 2), words);
            accumulate_qk_of_transposed_4_bit_keys<DTYPE, ROWS, VECTORS>(nibble, words[0] + t, by_block[0] + t, (remaining + 7) / 8,
                                                                         queries + c / 2, units, c > 0, out + t);
        }
    }
}

// Packed P of token pairs times the scales of BLOCKS blocks, for ROWS rows.
template <int ROWS>
struct BlockScaledP {
    alignas(64) uint32_t units[ROWS][BLOCK_N / 2][BLOCKS];

    // Packs scaled P, or its rounding error. A masked P stays 0, whatever the scale.
    void pack_scaled_p_into_this(const Rows& scale_rows, int64_t first_block, int64_t blocks_per_row, const float* probabilities, bool pack_residual) {
        alignas(64) uint64_t raw[BLOCK_N];
        alignas(64) float scales[BLOCK_N / 2][16];  // per pair: one token's and the other's, block by block
        int64_t count = round_up(scale_rows.count, 8);
        const CodeToBf16Table<E4M3> table;
        for (int64_t t = 0; t < count; t++) copy_8_block_scales_of_token(scale_rows, t, first_block, blocks_per_row, raw + t);
        for (int64_t t = 0; t < count; t += 8) {
            __m512i codes = _mm512_permutexvar_epi8(_mm512_load_si512(NIBBLE_ORDERS.pairs), _mm512_load_si512(raw + t));
            decode_64_e4m3_scales_in_unpack_order(codes, table, scales[t / 2]);
        }
        auto packed_p = [&](const float* p, int64_t pair) {
            __m512 x = _mm512_castpd_ps(_mm512_set1_pd(load<double>(p + 2 * pair)));
            __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
            x = _mm512_maskz_mul_ps(seen, x, _mm512_load_ps(scales[pair]));
            return pack_residual ? (__m512)((VecF)x - round_to_bf16((VecF)x)) : x;
        };
        for (int r = 0; r < ROWS; r++)
            for (int64_t i = 0; i < count / 2; i += 2) {
                const float* p = probabilities + r * BLOCK_N;
                _mm512_store_si512(units[r][i], (__m512i)_mm512_cvtne2ps_pbh(packed_p(p, i + 1), packed_p(p, i)));
            }
    }

    // Returns scaled P in the lane order of `Nibble::load_value_pairs`, from column c on.
    INLINE __m512i scaled_p_at(int r, int64_t pair, int64_t c) const {
        const void* from = units[r][pair] + c / 16 % BLOCKS;
        return _mm512_broadcast_i32x4(_mm_load_si128(static_cast<const __m128i*>(from)));
    }
};

}  // namespace
#endif
