// Schedules a call's requests as work items over the threads, combines splits, and stores the outputs.
#pragma once

#include "attention.h"
#include "thread_pool.h"

namespace {

// Work is counted in codes × (query rows + CONVERSION, the cost of converting a code). Another thread is woken for at
// least WORTH_A_THREAD, some 50 µs; of a team, which may be awake, for WORTH_A_TEAM. A split has at least
// MIN_SPLIT_KEYS.
constexpr int64_t CONVERSION = 4, WORTH_A_THREAD = 4 << 20, WORTH_A_TEAM = 1 << 20, MIN_SPLIT_KEYS = 4 * BLOCK_N, ITEMS_PER_THREAD = 4;
constexpr int64_t BATCH_INVARIANT_SPLIT_KEYS = 32 * BLOCK_N;  // keys of a split

constexpr int64_t LIST_ENTRIES_OF_ITEM = 1 << 13;  // entries of lists that a thread checks at a time

// Returns whether `small_m.h` supports a set: at most one scale per row, or e2m1's block scales.
inline bool supports_small_m(const Attention& c, const KeySet& s) {
    auto known = [](const PagedMatrix& m) {
        bool of_row = m.width == m.columns && m.scale_dtype == F32, of_blocks = m.width == 16 && m.scale_dtype == E4M3;
        return m.dtype == E2M1 ? of_blocks : m.dtype != F16 && (!m.width || of_row);
    };
    return s.num_keys == 1 && s.num_values == 1 && c.new_keys.codes.tensor < 0 && known(s.keys[0]) && known(s.values[0]);
}

template <class Packing>
struct AttentionRun {
    const Attention& c;
    Addresses at;
    int64_t threads, worth;  // worth: threads that this much work justifies
    Report& report;
    Request* requests;
    WorkItem* items;
    int64_t num_requests, num_items, num_splits_total, num_combines, item_heads, max_rows;
    int64_t lists_of_item, first_faulty_list;  // num_requests: none is
    int64_t* remaining;  // per combine: unfinished splits
    int64_t* first_split;
    float* states;
    int64_t split_floats;
    double work_of_split;  // work that a split should have
    size_t tile_bytes;
    bool no_memory;

    AttentionRun(const Attention& call, Addresses addresses, int64_t n, Report& r) : c(call), at(addresses), threads(n), worth(1), report(r) {}

    void operator()() {
        if (!plan_items()) return;
        parallel_for(num_items, worth, threads, attend_and_combine_if_last, this);
        if (__atomic_load_n(&no_memory, __ATOMIC_RELAXED)) report.fault = NO_MEMORY;
    }

private:
    int64_t num_m_blocks(const Request& r) const {
        return r.keys + r.extra_keys > 0 ? (r.rows * c.group + MAX_BLOCK_M - 1) / MAX_BLOCK_M : 0;
    }

    // Returns the unsplit work item of an m_block over a set: its rows, and the range of keys visible to them.
    WorkItem make_unsplit_item(int64_t i_request, int64_t i_m_block, int64_t i_set) const {
        const Request& r = requests[i_request];
        WorkItem item = {};
        item.request = i_request, item.set = i_set, item.row = i_m_block * MAX_BLOCK_M, item.heads = item_heads < r.heads ? item_heads : r.heads;
        item.small_m = Packing::VALUES == 2 && !c.prefill_invariant && r.rows * c.group <= MAX_SMALL_M && supports_small_m(c, c.sets[i_set]);
        item.rows = r.rows * c.group - item.row;
        if (item.rows > MAX_BLOCK_M) item.rows = MAX_BLOCK_M;
        if (has_lists(c)) return item.end = i_set ? r.extra_keys : r.keys, item;
        MaskArgs mask_args = {r.keys, r.keys - r.rows, window_or_zero_if_all(c, r.keys), c.mask.tensor < 0 ? nullptr : at[c.mask.tensor], 0};
        item.begin = item.first_key = mask_args.first_visible(item.row / c.group);
        item.end = mask_args.visible_end((item.row + item.rows - 1) / c.group);
        if (item.end < item.begin) item.end = item.begin;
        if (c.prefill_invariant) item.begin -= item.begin % BATCH_INVARIANT_SPLIT_KEYS;
        return item;
    }

    double work_of_item(const WorkItem& item) const {
        const KeySet& set = c.sets[item.set];
        double columns = value_columns(set);
        for (int64_t i = 0; i < set.num_keys; i++) columns += set.keys[i].columns;
        return columns * (item.end - item.begin) * item.heads * (item.rows + CONVERSION);
    }

    // Calls on_items_and_count(items, n) with the unsplit items of each m_block, one a set; one without keys only if none has any.
    template <class F>
    void for_unsplit_items_of_each_m_block(F on_items_and_count) const {
        for (int64_t b = 0; b < num_requests; b++)
            for (int64_t i = 0; i < num_m_blocks(requests[b]); i++) {
                WorkItem of_sets[2];
                int64_t n = 0;
                for (int64_t set = 0; set < c.num_sets; set++)
                    if (!set || requests[b].extra_keys > 0) of_sets[n++] = make_unsplit_item(b, i, set);
                bool nothing = n > 1 && of_sets[0].end <= of_sets[0].begin;
                on_items_and_count(of_sets + nothing, n - nothing);
            }
    }

    bool plan_items() {
        num_requests = has_lists(c) ? c.rows * c.sets[0].lists.heads : c.requests;
        requests = reinterpret_cast<Request*>(cached_buffer(FOR_REQUESTS, num_requests * sizeof(Request) + 64));
        if (requests == nullptr) return report.fault = NO_MEMORY, false;
        if (!(has_lists(c) ? read_checked_lists_and_store_empty_rows() : read_checked_requests_and_store_empty_rows())) return false;
        int64_t longest = 0;
        for (int64_t b = 0; b < num_requests; b++)
            if (num_m_blocks(requests[b]) > 0 && requests[b].rows > longest) longest = requests[b].rows;
        max_rows = longest * c.group < MAX_BLOCK_M ? longest * c.group : MAX_BLOCK_M;
        // Adjacent heads are read together, as long as their state stays small.
        const StridedTensor& values = c.sets[0].values[0].codes;
        bool beside = c.heads == 1 || values.strides[2] <= values.strides[1];
        item_heads = beside && c.heads * max_rows <= MAX_BLOCK_M ? c.heads : 1;
        double total = total_work(), wanted = total / (has_team() ? WORTH_A_TEAM : WORTH_A_THREAD);
        worth = wanted < threads - 1 ? static_cast<int64_t>(wanted) + 1 : threads;
        work_of_split = worth > 1 ? total / (worth * ITEMS_PER_THREAD) : total;
        num_items = num_splits_total = num_combines = 0;
        for_unsplit_items_of_each_m_block([&](const WorkItem* of_sets, int64_t n) { count_items_of_m_block(of_sets, n); });
        if (!allocate_items_and_states()) return report.fault = NO_MEMORY, false;
        num_items = num_splits_total = num_combines = 0;
        for_unsplit_items_of_each_m_block([&](const WorkItem* of_sets, int64_t n) { append_items_of_m_block(of_sets, n); });
        return true;
    }

    double total_work() const {
        double total = 0;
        for_unsplit_items_of_each_m_block([&](const WorkItem* of_sets, int64_t n) {
            for (int64_t i = 0; i < n; i++) total += work_of_item(of_sets[i]) * num_head_sets(of_sets[i]);
        });
        return total;
    }

    int64_t num_splits(const WorkItem& item) const {
        int64_t keys = item.end - item.begin, most = keys / MIN_SPLIT_KEYS;
        if (c.batch_invariant) return keys > 0 ? (keys + BATCH_INVARIANT_SPLIT_KEYS - 1) / BATCH_INVARIANT_SPLIT_KEYS : 1;
        int64_t n = static_cast<int64_t>(work_of_item(item) / (work_of_split > 1 ? work_of_split : 1) + 0.5);
        n = n < most ? n : most;
        return n > 1 ? n : 1;
    }

    int64_t num_splits_of_m_block(const WorkItem* items_by_set, int64_t num_sets) const {
        int64_t splits = 0;
        for (int64_t i = 0; i < num_sets; i++) splits += num_splits(items_by_set[i]);
        return splits;
    }

    // Adds the items, splits and combines of an m_block to their counts.
    void count_items_of_m_block(const WorkItem* items_by_set, int64_t num_sets) {
        int64_t splits = num_splits_of_m_block(items_by_set, num_sets), head_sets = num_head_sets(items_by_set[0]);
        num_items += splits * head_sets;
        if (splits > 1) num_splits_total += splits * head_sets, num_combines += head_sets;
    }

    // Appends the items of an m_block, divided by heads and split by keys, and counts them again.
    void append_items_of_m_block(const WorkItem* items_by_set, int64_t num_sets) {
        int64_t splits = num_splits_of_m_block(items_by_set, num_sets), head = requests[items_by_set[0].request].head;
        for (int64_t h = 0; h < num_head_sets(items_by_set[0]); h++, head += items_by_set[0].heads) {
            if (splits > 1) first_split[num_combines] = num_splits_total, remaining[num_combines] = splits;
            for (int64_t i = 0; i < num_sets; i++) {
                WorkItem item = items_by_set[i];
                int64_t begin = item.begin, end = item.end, parts = num_splits(item);
                int64_t length = c.prefill_invariant ? BATCH_INVARIANT_SPLIT_KEYS : round_up((end - begin + parts - 1) / parts, BLOCK_N);
                item.head = head, item.combine = num_combines;
                for (int64_t p = 0; p < parts; p++) {
                    item.begin = begin + p * length < end ? begin + p * length : end;
                    item.end = item.begin + length < end ? item.begin + length : end;
                    item.state = splits > 1 ? num_splits_total++ : -1;
                    items[num_items++] = item;
                }
            }
            if (splits > 1) num_combines++;
        }
    }

    // Returns how many items a request's heads are divided into.
    int64_t num_head_sets(const WorkItem& item) const { return requests[item.request].heads / item.heads; }

    bool allocate_items_and_states() {
        const bool each[] = {false, true};
        tile_bytes = split_floats = 0;
        for (bool small_m : each) {
            Tiles<Packing> tiles(c, small_m);
            size_t bytes = tiles.lay_out_and_return_bytes(nullptr, item_heads, max_rows);
            int64_t floats = round_up(item_heads * max_rows * (tiles.state_stride + 2), 16);
            tile_bytes = bytes > tile_bytes ? bytes : tile_bytes;
            split_floats = floats > split_floats ? floats : split_floats;
        }
        size_t item_bytes = round_up(num_items * sizeof(WorkItem), 64), combine_bytes = round_up(num_combines * 8, 64);
        char* p = cached_buffer(FOR_CALL, item_bytes + 2 * combine_bytes + 4 * split_floats * num_splits_total + 64);
        if (p == nullptr) return false;
        items = reinterpret_cast<WorkItem*>(p);
        remaining = reinterpret_cast<int64_t*>(p + item_bytes);
        first_split = reinterpret_cast<int64_t*>(p + item_bytes + combine_bytes);
        states = reinterpret_cast<float*>(p + item_bytes + 2 * combine_bytes);
        no_memory = false;
        return true;
    }

    bool report_fault(Fault fault, int64_t request, int64_t a, int64_t b) {
        report = {fault, request, {a, b}};
        return false;
    }

    // Reads and checks lengths, rows and pages, and stores the rows without keys. Lengths and offsets may be any
    // numbers until they are checked.
    bool read_checked_requests_and_store_empty_rows() {
        const KeySet& set = c.sets[0];
        int64_t next = 0, room = saturating_product(set.max_pages, set.page_size);
        for (int64_t b = 0; b < c.requests; b++) {
            Request& r = requests[b];
            r = {}, r.heads = c.heads;
            r.keys = read_index(at[c.seq_lens.tensor], c.seq_lens.dtype, b);
            bool ragged = c.cu_seqlens_q.tensor >= 0;
            const char* starts = ragged ? at[c.cu_seqlens_q.tensor] : nullptr;
            r.row = ragged ? read_index(starts, c.cu_seqlens_q.dtype, b) : b * c.max_q_len;
            int64_t stop = ragged ? read_index(starts, c.cu_seqlens_q.dtype, b + 1) : r.row + c.max_q_len;
            if (r.keys <= 0 || stop <= r.row) {
                r.keys = 0;
                continue;
            }
            r.rows = saturating_difference(stop, r.row);
            bool fresh = c.new_keys.codes.tensor >= 0;
            int64_t paged = !fresh ? r.keys : r.keys > r.rows ? r.keys - r.rows : 0;
            if (paged > room) return report_fault(fresh ? PREFIX_TOO_LONG : TOO_LONG, b, room, paged);
            if (r.row < 0 || stop > c.rows) return report_fault(ROWS_OUTSIDE, b, r.row, stop);
            if (r.rows > c.max_q_len) return report_fault(TOO_MANY_ROWS, b, r.rows, c.max_q_len);
            MaskArgs mask_args = {r.keys, r.keys - r.rows, window_or_zero_if_all(c, r.keys), nullptr, 0};
            const char* table = at[set.page_table.tensor] + b * set.page_table.stride;
            for (int64_t i = mask_args.first_visible(0) / set.page_size, used = paged / set.page_size + (paged % set.page_size > 0); i < used; i++) {
                int64_t page = read_index(table, set.page_table.dtype, i);
                if (page < 0 || page >= set.num_pages) return report_fault(PAGE_OUTSIDE, b, set.num_pages, page);
            }
        }
        for (int64_t b = 0; b < c.requests; b++) {
            const Request& r = requests[b];
            if (r.keys == 0) continue;
            // Requests are in order of rows; rows between them belong to none.
            store_empty_output_rows(next, r.row);
            if (r.row + r.rows > next) next = r.row + r.rows;
        }
        store_empty_output_rows(next, c.rows);
        return true;
    }

    // Makes a request of each row, or of each of its lists, and checks their entries.
    bool read_checked_lists_and_store_empty_rows() {
        int64_t lists = c.sets[0].lists.heads, b = 0, entries = 0;
        bool ragged = c.cu_seqlens_q.tensor >= 0;
        auto start = [&](int64_t i) { return ragged ? read_index(at[c.cu_seqlens_q.tensor], c.cu_seqlens_q.dtype, i) : i * c.max_q_len; };
        for (int64_t t = 0; t < c.rows; t++) {
            while (b < c.requests && t >= start(b + 1)) b++;
            bool known = b < c.requests && t >= start(0);
            int64_t last = -1;
            if (known && c.seq_lens.tensor >= 0)
                last = saturating_difference(read_index(at[c.seq_lens.tensor], c.seq_lens.dtype, b), saturating_difference(start(b + 1), t));
            for (int64_t h = 0; h < lists; h++) {
                Request& r = requests[t * lists + h];
                r = {}, r.row = t, r.rows = 1, r.head = h, r.heads = c.heads / lists, r.table_row = known ? b : -1, r.last = last;
            }
        }
        for (int64_t i = 0; i < c.num_sets; i++) entries += c.sets[i].lists.length;
        int64_t step = LIST_ENTRIES_OF_ITEM / (entries > 1 ? entries : 1) + 1;
        lists_of_item = step, first_faulty_list = num_requests;
        parallel_for((num_requests + step - 1) / step, num_requests * entries > 2 * LIST_ENTRIES_OF_ITEM ? threads : 1, threads, check_lists_of_item, this);
        if (first_faulty_list < num_requests) {
            Request& r = requests[first_faulty_list];
            for (int64_t i = 0; i < c.num_sets && report.fault == NO_FAULT; i++) check_list_and_return_visible_end(r, i, report);
            bool of_table = report.fault == LISTED_PAGE_OUTSIDE;
            report.at[0] = of_table ? r.table_row : r.row, report.at[1] = lists > 1 && !of_table ? r.head : -1;
            return false;
        }
        for (int64_t i = 0; i < num_requests; i++)
            if (num_m_blocks(requests[i]) == 0) store_empty_output_row(requests[i].row, requests[i].head, requests[i].heads);
        return true;
    }

    static void check_lists_of_item(void* context, int64_t item) {
        AttentionRun& self = *static_cast<AttentionRun*>(context);
        int64_t begin = item * self.lists_of_item, end = begin + self.lists_of_item;
        for (int64_t i = begin; i < end && i < self.num_requests; i++) {
            Request& r = self.requests[i];
            Report found = {};
            r.keys = self.check_list_and_return_visible_end(r, 0, found);
            r.extra_keys = self.c.num_sets > 1 ? self.check_list_and_return_visible_end(r, 1, found) : 0;
            int64_t old = __atomic_load_n(&self.first_faulty_list, __ATOMIC_RELAXED);
            while (found.fault != NO_FAULT && i < old && !__atomic_compare_exchange_n(&self.first_faulty_list, &old, i, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        }
    }

    // Returns the keys of a request's list, up to the last that is seen; `found` reports a wrong entry.
    int64_t check_list_and_return_visible_end(const Request& r, int64_t i_set, Report& found) const {
        const KeyLists& l = c.sets[i_set].lists;
        int64_t used = l.length;
        if (l.lens.tensor >= 0) {
            int64_t n = read_index(at[l.lens.tensor] + r.row * l.lens.strides[0] + r.head * l.lens.strides[1], l.lens_dtype, 0);
            used = n < used ? n : used;
        }
        int64_t keys = used > 0 ? key_list_of_request(c, at, r, i_set).check_entries_and_return_visible_end(used, found) : 0;
        if (keys < 0) found.request = i_set;
        return keys;
    }

    void store_empty_output_rows(int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) store_empty_output_row(t, 0, c.heads);
    }

    void store_empty_output_row(int64_t row, int64_t head, int64_t heads) {
        for (int64_t h = head * c.group; h < (head + heads) * c.group; h++) normalize_and_store_output_row_and_lse(row, h, nullptr, {NEGATIVE_INFINITY, 0.0f}, 0.0f);
    }

    static void attend_and_combine_if_last(void* context, int64_t index) {
        AttentionRun& self = *static_cast<AttentionRun*>(context);
        const WorkItem& item = self.items[index];
        AttentionItem<Packing> attend(self.c, self.at, item);
        char* memory = cached_buffer(FOR_ITEM, self.tile_bytes);
        if (memory == nullptr) return __atomic_store_n(&self.no_memory, true, __ATOMIC_RELAXED);
        attend.tiles.lay_out_and_return_bytes(memory, self.item_heads, self.max_rows);
        State state = item.state < 0 ? attend.tiles.item_state : self.state_of(item.state, attend.tiles.state_stride);
        attend.attend_work_item_into_state(item, self.requests[item.request], state);
        if (item.state < 0) return self.normalize_and_store_outputs(item, state);
        // The last split to finish combines them all.
        if (__atomic_sub_fetch(&self.remaining[item.combine], 1, __ATOMIC_ACQ_REL) == 0) self.combine_split_states_and_store_outputs(item, state.stride);
    }

    State state_of(int64_t split, int64_t stride) const {
        float* values = states + split * split_floats;
        return {values, reinterpret_cast<SoftmaxState*>(values + item_heads * max_rows * stride), stride};
    }

    // Combines the partial states of all splits into the first.
    void combine_split_states_and_store_outputs(const WorkItem& item, int64_t acc_row_stride) {
        int64_t begin = first_split[item.combine], end = item.combine + 1 < num_combines ? first_split[item.combine + 1] : num_splits_total;
        State whole = state_of(begin, acc_row_stride);
        for (int64_t p = begin + 1; p < end; p++) {
            State part = state_of(p, acc_row_stride);
            for (int64_t i = 0; i < item.heads * item.rows; i++) {
                SoftmaxState &a = whole.softmax[i], b = part.softmax[i];
                float top = b.top > a.top ? b.top : a.top, base = top == NEGATIVE_INFINITY ? 0.0f : top;
                float by_a = exp2_of_nonpositive(broadcast(a.top - base))[0], by_b = exp2_of_nonpositive(broadcast(b.top - base))[0];
                a = {top, a.total * by_a + b.total * by_b};
                float *x = whole.values + i * acc_row_stride, *y = part.values + i * acc_row_stride;
                for (int64_t j = 0; j < acc_row_stride; j += W)
                    store(x + j, load<VecF>(x + j) * by_a + load<VecF>(y + j) * by_b);
            }
        }
        normalize_and_store_outputs(item, whole);
    }

    void normalize_and_store_outputs(const WorkItem& item, const State& unrotated_state) {
        const Request& r = requests[item.request];
        for (int64_t h = 0; h < item.heads; h++) {
            float scale = scales_own_values(c) ? 1.0f : load_scale_or_host_value(c.sets[0].v_scale, at, item.head + h);
            float factor = scale * load_scale_or_host_value(c.out_scale, at, 0);
            for (int64_t m = 0; m < item.rows; m++) {
                int64_t row = item.row + m, i = h * item.rows + m;
                normalize_and_store_output_row_and_lse(r.row + row / c.group, (item.head + h) * c.group + row % c.group, unrotated_state.values + i * unrotated_state.stride,
                    unrotated_state.softmax[i], factor);
            }
        }
    }

    // Stores an output row, acc_o / row_sum × v_and_out_scale, and its LSE. A sink is one more score with a zero value.
    void normalize_and_store_output_row_and_lse(int64_t row, int64_t head, const float* unrotated_acc_o, SoftmaxState softmax_state, float v_and_out_scale) {
        bool seen = softmax_state.total != 0.0f;  // a NaN row_sum counts as visible keys
        float total = softmax_state.total, top = softmax_state.top;
        if (seen && c.sinks >= 0) {
            float sink = load<float>(at[c.sinks] + 4 * head) * LOG2E;
            float most = sink > top ? sink : top;
            bool infinite = most == -NEGATIVE_INFINITY;  // such a sink takes all; inf - inf would be NaN
            float old = infinite ? 0.0f : exp2_of_nonpositive(broadcast(top - most))[0];
            total = infinite ? 1.0f : total * old + exp2_of_nonpositive(broadcast(sink - most))[0];
            v_and_out_scale *= old;
            top = most;
        }
        char* out = at[c.out.tensor] + row * c.out.strides[0] + head * c.out.strides[1];
        int64_t columns = value_columns(c.sets[0]), size = c.out_dtype == F32 ? 4 : c.out_dtype == E4M3 || c.out_dtype == E5M2 ? 1 : 2;
        float by = seen ? v_and_out_scale / total : 0.0f, x[64];
        for (int64_t begin = 0; begin < columns; begin += 64) {
            int64_t n = columns - begin < 64 ? columns - begin : 64;
            for (int64_t i = 0; i < n; i++) x[i] = seen ? unrotated_acc_o[begin + i] * by : 0.0f;
            write_floats(x, c.out_dtype, out + begin * size, n);
        }
        auto store_number = [&](const StridedTensor& p, float x) {
            if (p.tensor >= 0) store(at[p.tensor] + row * p.strides[0] + head * p.strides[1], seen ? x : NEGATIVE_INFINITY);
        };
        store_number(c.lse, c.lse_of_keys ? softmax_state.top * LN2 + __builtin_logf(softmax_state.total) : top * LN2 + __builtin_logf(total));
        store_number(c.max_logits, softmax_state.top * LN2);
    }
};

// Returns whether bf16 products are exact to the precision of the output.
inline bool uses_bf16_products(const Attention& c) {
    auto short_enough = [](int64_t dtype) { return dtype != F32 && dtype != F16; };
    if (is_transformed(c.key_transform)) return false;  // a rotated query has more bits
    bool codes = short_enough(c.query_dtype) && short_enough(c.out_dtype);
    for (int64_t i = 0; i < c.num_sets; i++) {
        for (int64_t j = 0; j < c.sets[i].num_keys; j++) codes = codes && short_enough(c.sets[i].keys[j].dtype);
        for (int64_t j = 0; j < c.sets[i].num_values; j++) codes = codes && short_enough(c.sets[i].values[j].dtype);
    }
    if (c.new_keys.codes.tensor >= 0) codes = codes && short_enough(c.new_keys.dtype);
    return codes;
}

void attention(const Attention& c, Addresses at, int64_t threads, Report& report) {
    report = {};
#if HAS_BF16_PRODUCTS
    if (uses_bf16_products(c)) return AttentionRun<Bf16Packing>(c, at, threads, report)();
#endif
    AttentionRun<Fp32Packing>(c, at, threads, report)();
}

}  // namespace
