// A call's requests → items of work for the threads, and the joining of what they leave.
#pragma once

#include "attention.h"
#include "pool.h"

namespace {

// Work is counted in codes × (query rows + CONVERSION): that is what converting a code takes. Another thread is woken
// for no less than WORTH_A_THREAD, some 50 µs; of a team, which may well be awake, for WORTH_A_TEAM. Pieces of keys are
// not made shorter than SHORTEST.
constexpr int64_t CONVERSION = 4, WORTH_A_THREAD = 4 << 20, WORTH_A_TEAM = 1 << 20, SHORTEST = 4 * TILE, ITEMS_PER_THREAD = 4;
constexpr int64_t INVARIANT = 32 * TILE;  // keys of a piece where neither other requests nor threads may count

// Whether few rows of queries are attended by `few.h`: one factor at most for a row, or e2m1's.
inline bool made_for_few(const Attention& c) {
    auto known = [](const Matrix& m) {
        bool of_row = m.width == m.columns && m.factor_dtype == F32, of_blocks = m.width == 16 && m.factor_dtype == E4M3;
        return m.dtype == E2M1 ? of_blocks : m.dtype != F16 && (!m.width || of_row);
    };
    return c.num_keys == 1 && c.new_keys.codes.tensor < 0 && known(c.keys[0]) && known(c.values);
}

template <class Unit>
struct Run {
    const Attention& c;
    Addresses at;
    int64_t threads, worth;  // worth: of these threads, for so little work
    Report& report;
    Request* requests;
    Item* items;
    int64_t num_items, num_pieces, num_joins, item_heads, most_rows;
    int64_t* left;  // of each join: pieces that are not done
    int64_t* first_piece;
    float* states;
    int64_t piece_floats;
    size_t tile_bytes;
    bool no_memory;

    Run(const Attention& call, Addresses addresses, int64_t n, Report& r) : c(call), at(addresses), threads(n), worth(1), report(r) {}

    void operator()() {
        if (!plan()) return;
        parallel(num_items, worth, threads, work, this);
        if (__atomic_load_n(&no_memory, __ATOMIC_RELAXED)) report.fault = NO_MEMORY;
    }

private:
    int64_t row_blocks(const Request& r) const { return r.keys > 0 ? (r.rows * c.group + MOST_ROWS - 1) / MOST_ROWS : 0; }

    // The keys that rows [row, row + rows) of a request see, and how many pieces they are cut into.
    Item block(int64_t request, int64_t index) const {
        const Request& r = requests[request];
        Item item = {};
        item.request = request, item.row = index * MOST_ROWS, item.heads = item_heads;
        item.few = Unit::VALUES == 2 && r.rows * c.group <= MOST_FEW && made_for_few(c);
        item.rows = r.rows * c.group - item.row;
        if (item.rows > MOST_ROWS) item.rows = MOST_ROWS;
        Sight sight = {r.keys, r.keys - r.rows, window_of(c, r.keys), c.mask.tensor < 0 ? nullptr : at[c.mask.tensor], 0};
        item.begin = sight.low(item.row / c.group);
        item.end = sight.high((item.row + item.rows - 1) / c.group);
        if (item.end < item.begin) item.end = item.begin;
        return item;
    }

    double cost(const Item& item) const {
        double columns = c.values.columns;
        for (int64_t i = 0; i < c.num_keys; i++) columns += c.keys[i].columns;
        return columns * (item.end - item.begin) * item.heads * (item.rows + CONVERSION);
    }

    template <class F>
    void each_block(F f) {
        for (int64_t b = 0; b < c.requests; b++)
            for (int64_t i = 0; i < row_blocks(requests[b]); i++) f(block(b, i));
    }

    bool plan() {
        requests = reinterpret_cast<Request*>(kept(FOR_REQUESTS, c.requests * sizeof(Request) + 64));
        if (requests == nullptr) return report.fault = NO_MEMORY, false;
        if (!read_requests()) return false;
        int64_t longest = 0;
        for (int64_t b = 0; b < c.requests; b++)
            if (requests[b].keys > 0 && requests[b].rows > longest) longest = requests[b].rows;
        most_rows = longest * c.group < MOST_ROWS ? longest * c.group : MOST_ROWS;
        // Heads that lie side by side are read together, as long as their state stays small.
        bool beside = c.heads == 1 || c.values.codes.strides[2] <= c.values.codes.strides[1];
        item_heads = beside && c.heads * most_rows <= MOST_ROWS ? c.heads : 1;
        double total = 0;
        each_block([&](const Item& item) { total += cost(item) * (c.heads / item_heads); });
        double wanted = total / (has_team() ? WORTH_A_TEAM : WORTH_A_THREAD);
        worth = wanted < threads - 1 ? static_cast<int64_t>(wanted) + 1 : threads;
        double share = worth > 1 ? total / (worth * ITEMS_PER_THREAD) : total;
        auto pieces = [&](const Item& item) {
            int64_t keys = item.end - item.begin, most = keys / SHORTEST;
            if (c.batch_invariant) return keys > 0 ? (keys + INVARIANT - 1) / INVARIANT : 1;
            int64_t n = static_cast<int64_t>(cost(item) / (share > 1 ? share : 1) + 0.5);
            n = n < most ? n : most;
            return n > 1 ? n : 1;
        };
        num_items = num_pieces = num_joins = 0;
        each_block([&](const Item& item) {
            int64_t n = pieces(item), sets = c.heads / item_heads;
            num_items += n * sets;
            if (n > 1) num_pieces += n * sets, num_joins += sets;
        });
        if (!lay_out()) return report.fault = NO_MEMORY, false;
        int64_t i = 0, piece = 0, join = 0;
        each_block([&](Item item) {
            int64_t n = pieces(item), begin = item.begin, end = item.end;
            int64_t length = up((end - begin + n - 1) / n, TILE);
            for (item.head = 0; item.head < c.heads; item.head += item_heads) {
                if (n > 1) first_piece[join] = piece, left[join] = n;
                for (int64_t p = 0; p < n; p++) {
                    item.begin = begin + p * length < end ? begin + p * length : end;
                    item.end = item.begin + length < end ? item.begin + length : end;
                    item.state = n > 1 ? piece++ : -1;
                    item.join = join;
                    items[i++] = item;
                }
                if (n > 1) join++;
            }
        });
        return true;
    }

    bool lay_out() {
        const bool each[] = {false, true};
        tile_bytes = piece_floats = 0;
        for (bool few : each) {
            Tiles<Unit> tiles(c, few);
            size_t bytes = tiles.lay_out(nullptr, item_heads, most_rows);
            int64_t floats = up(item_heads * most_rows * (tiles.state_stride + 2), 16);
            tile_bytes = bytes > tile_bytes ? bytes : tile_bytes;
            piece_floats = floats > piece_floats ? floats : piece_floats;
        }
        size_t item_bytes = up(num_items * sizeof(Item), 64), join_bytes = up(num_joins * 8, 64);
        char* p = kept(FOR_CALL, item_bytes + 2 * join_bytes + 4 * piece_floats * num_pieces + 64);
        if (p == nullptr) return false;
        items = reinterpret_cast<Item*>(p);
        left = reinterpret_cast<int64_t*>(p + item_bytes);
        first_piece = reinterpret_cast<int64_t*>(p + item_bytes + join_bytes);
        states = reinterpret_cast<float*>(p + item_bytes + 2 * join_bytes);
        no_memory = false;
        return true;
    }

    bool fail(Fault fault, int64_t request, int64_t a, int64_t b) {
        report = {fault, request, {a, b}};
        return false;
    }

    // Reads and checks lengths, rows and pages, and writes the rows that have nothing to attend to. Lengths and offsets
    // are any numbers until they are checked.
    bool read_requests() {
        int64_t next = 0, room = product(c.max_pages, c.page_size);
        for (int64_t b = 0; b < c.requests; b++) {
            Request& r = requests[b];
            r.keys = read_index(at[c.seq_lens.tensor], c.seq_lens.dtype, b);
            bool ragged = c.cu_seqlens_q.tensor >= 0;
            const char* starts = ragged ? at[c.cu_seqlens_q.tensor] : nullptr;
            r.row = ragged ? read_index(starts, c.cu_seqlens_q.dtype, b) : b * c.max_q_len;
            int64_t stop = ragged ? read_index(starts, c.cu_seqlens_q.dtype, b + 1) : r.row + c.max_q_len;
            if (r.keys <= 0 || stop <= r.row) {
                r.keys = 0;
                continue;
            }
            r.rows = difference(stop, r.row);
            bool fresh = c.new_keys.codes.tensor >= 0;
            int64_t paged = !fresh ? r.keys : r.keys > r.rows ? r.keys - r.rows : 0;
            if (paged > room) return fail(fresh ? PREFIX_TOO_LONG : TOO_LONG, b, room, paged);
            if (r.row < 0 || stop > c.rows) return fail(ROWS_OUTSIDE, b, r.row, stop);
            if (r.rows > c.max_q_len) return fail(TOO_MANY_ROWS, b, r.rows, c.max_q_len);
            Sight sight = {r.keys, r.keys - r.rows, window_of(c, r.keys), nullptr, 0};
            const char* table = at[c.page_table.tensor] + b * c.page_table.stride;
            for (int64_t i = sight.low(0) / c.page_size, used = paged / c.page_size + (paged % c.page_size > 0); i < used; i++) {
                int64_t page = read_index(table, c.page_table.dtype, i);
                if (page < 0 || page >= c.num_pages) return fail(PAGE_OUTSIDE, b, c.num_pages, page);
            }
        }
        for (int64_t b = 0; b < c.requests; b++) {
            const Request& r = requests[b];
            if (r.keys == 0) continue;
            // Requests lie one after the other; rows between them are no request's.
            write_nothing(next, r.row);
            if (r.row + r.rows > next) next = r.row + r.rows;
        }
        write_nothing(next, c.rows);
        return true;
    }

    void write_nothing(int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++)
            for (int64_t h = 0; h < c.heads * c.group; h++) put(t, h, nullptr, {NEGATIVE_INFINITY, 0.0f}, 0.0f);
    }

    static void work(void* context, int64_t index) {
        Run& self = *static_cast<Run*>(context);
        const Item& item = self.items[index];
        Attend<Unit> attend(self.c, self.at, item.few);
        char* memory = kept(FOR_ITEM, self.tile_bytes);
        if (memory == nullptr) return __atomic_store_n(&self.no_memory, true, __ATOMIC_RELAXED);
        attend.tiles.lay_out(memory, self.item_heads, self.most_rows);
        State state = item.state < 0 ? attend.tiles.own : self.state_of(item.state, attend.tiles.state_stride);
        attend.run(item, self.requests[item.request], state);
        if (item.state < 0) return self.finish(item, state);
        // Whoever is the last of a join's pieces joins them all.
        if (__atomic_sub_fetch(&self.left[item.join], 1, __ATOMIC_ACQ_REL) == 0) self.join(item, state.stride);
    }

    State state_of(int64_t piece, int64_t stride) const {
        float* values = states + piece * piece_floats;
        return {values, reinterpret_cast<Running*>(values + item_heads * most_rows * stride), stride};
    }

    // The states of a join's pieces into the first.
    void join(const Item& item, int64_t stride) {
        int64_t begin = first_piece[item.join], end = item.join + 1 < num_joins ? first_piece[item.join + 1] : num_pieces;
        State whole = state_of(begin, stride);
        for (int64_t p = begin + 1; p < end; p++) {
            State part = state_of(p, stride);
            for (int64_t i = 0; i < item.heads * item.rows; i++) {
                Running &a = whole.running[i], b = part.running[i];
                float top = b.top > a.top ? b.top : a.top, base = top == NEGATIVE_INFINITY ? 0.0f : top;
                float by_a = exp2(all(a.top - base))[0], by_b = exp2(all(b.top - base))[0];
                a = {top, a.total * by_a + b.total * by_b};
                float *x = whole.values + i * stride, *y = part.values + i * stride;
                for (int64_t j = 0; j < stride; j += W)
                    store(x + j, load<VecF>(x + j) * by_a + load<VecF>(y + j) * by_b);
            }
        }
        finish(item, whole);
    }

    void finish(const Item& item, const State& state) {
        const Request& r = requests[item.request];
        for (int64_t h = 0; h < item.heads; h++) {
            float scale = c.new_keys.codes.tensor < 0 ? number(c.v_scale, at, item.head + h) : 1.0f;
            float factor = scale * number(c.out_scale, at, 0);
            for (int64_t m = 0; m < item.rows; m++) {
                int64_t row = item.row + m, i = h * item.rows + m;
                put(r.row + row / c.group, (item.head + h) * c.group + row % c.group, state.values + i * state.stride,
                    state.running[i], factor);
            }
        }
    }

    // Writes a row of the output: its weighted values by its sum, times a factor. A sink is one more score without value.
    void put(int64_t row, int64_t head, const float* values, Running state, float factor) {
        bool seen = state.total != 0.0f;  // NaN counts as seen
        float total = state.total, top = state.top;
        if (seen && c.sinks >= 0) {
            float sink = load<float>(at[c.sinks] + 4 * head) * LOG2E;
            float most = sink > top ? sink : top;
            float old = exp2(all(top - most))[0];
            total = total * old + exp2(all(sink - most))[0];
            factor *= old;
            top = most;
        }
        char* out = at[c.out.tensor] + row * c.out.strides[0] + head * c.out.strides[1];
        int64_t columns = c.values.columns, size = c.out_dtype == F32 ? 4 : c.out_dtype == E4M3 || c.out_dtype == E5M2 ? 1 : 2;
        float by = seen ? factor / total : 0.0f, x[64];
        for (int64_t begin = 0; begin < columns; begin += 64) {
            int64_t n = columns - begin < 64 ? columns - begin : 64;
            for (int64_t i = 0; i < n; i++) x[i] = seen ? values[begin + i] * by : 0.0f;
            write_floats(x, c.out_dtype, out + begin * size, n);
        }
        if (c.lse.tensor < 0) return;
        float lse = seen ? top * LN2 + __builtin_logf(total) : NEGATIVE_INFINITY;
        store(at[c.lse.tensor] + row * c.lse.strides[0] + head * c.lse.strides[1], lse);
    }
};

// Whether pairs of bf16 numbers lose nothing that the output could show.
inline bool in_pairs(const Attention& c) {
    auto short_enough = [](int64_t dtype) { return dtype != F32 && dtype != F16; };
    if (turns(c.key_turn)) return false;  // a query that was turned has more bits
    bool codes = short_enough(c.values.dtype) && short_enough(c.query_dtype) && short_enough(c.out_dtype);
    for (int64_t i = 0; i < c.num_keys; i++) codes = codes && short_enough(c.keys[i].dtype);
    if (c.new_keys.codes.tensor >= 0) codes = codes && short_enough(c.new_keys.dtype);
    return codes;
}

void attention(const Attention& c, Addresses at, int64_t threads, Report& report) {
    report = {};
#if HAS_PAIRS
    if (in_pairs(c)) return Run<Pairs>(c, at, threads, report)();
#endif
    Run<Floats>(c, at, threads, report)();
}

}  // namespace
