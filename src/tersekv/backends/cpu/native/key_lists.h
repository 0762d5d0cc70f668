// Lists of keys: their entries → pages and slots of the keys that a row sees, a tile at a time.
#pragma once

#include "numbers.h"

namespace {

// The list of a row over one set of keys. Keys are counted by entry and offset, seen or not: key k is position k % block
// of entry k / block.
struct KeyList {
    const KeySet& set;
    const char *entries, *table;  // table: null where entries are slots
    int64_t last;                 // the last position, or slot, that can be seen; negative: none
    int64_t last_block, shift;    // its block; log2 of the page size, or −1

    KeyList(const KeySet& s, Addresses at, int64_t row, int64_t head, int64_t page_table_row, int64_t last_visible)
        : set(s), entries(at[s.lists.entries.tensor] + row * s.lists.entries.strides[0] + head * s.lists.entries.strides[1]),
          table(s.page_table.tensor < 0 ? nullptr : at[s.page_table.tensor] + page_table_row * s.page_table.stride), last(last_visible),
          last_block(last_visible < 0 ? -1 : last_visible / s.lists.block),
          shift(s.page_size & (s.page_size - 1) ? -1 : __builtin_ctzll(static_cast<unsigned long long>(s.page_size))) {}

    // Returns an entry; negative: padding.
    int64_t entry(int64_t i) const {
        int64_t x = read_index(entries + i * set.lists.entries.strides[2], set.lists.dtype, 0);
        return set.lists.dtype == U32 && x == UINT32_MAX ? -1 : x;
    }

    // Returns the page table's column of a position. A division takes as long as the rest of a short list's entry.
    int64_t column_of(int64_t position) const { return shift < 0 ? position / set.page_size : position >> shift; }

    int64_t page_of(int64_t column) const { return table == nullptr ? column : read_index(table, set.page_table.dtype, column); }

    // Calls on_key(i, page, slot) for up to `max_keys` keys that are seen, from key k on and before `end`, and moves k past
    // them. Returns their number.
    template <class OnKey>
    int64_t visit_visible_keys_and_return_count(int64_t& k, int64_t end, int64_t max_keys, OnKey on_key) const {
        int64_t count = 0, block = set.lists.block, i = k / block, offset = k % block, size = set.page_size;
        for (; k < end && count < max_keys; i++, offset = 0) {
            int64_t x = entry(i), left = block - offset < end - k ? block - offset : end - k;
            // No product of an entry with the block size before it is known to be seen.
            bool seen = x >= 0 && x <= last_block && x * block + offset <= last;
            if (!seen) {
                k += left;
                continue;
            }
            int64_t position = x * block + offset, n = last - position + 1 < left ? last - position + 1 : left;
            bool whole = n <= max_keys - count;
            if (!whole) n = max_keys - count;
            int64_t column = column_of(position), slot = position - column * size, page = page_of(column);
            for (int64_t j = 0; j < n; j++, slot++) {
                if (slot == size) slot = 0, page = page_of(++column);
                on_key(count++, page, slot);
            }
            k += whole ? left : n;
        }
        return count;
    }

    // Checks the first `num_entries` entries. Returns keys up to the last one that is seen; −1 with `report` for a wrong one.
    int64_t check_entries_and_return_visible_end(int64_t num_entries, Report& report) const {
        int64_t block = set.lists.block, columns = table == nullptr ? set.num_pages : set.max_pages, keys = 0;
        int64_t room = saturating_product(columns, set.page_size);
        for (int64_t i = 0; i < num_entries; i++) {
            int64_t x = entry(i);
            if (x < 0) continue;
            if (!set.lists.causal && x >= room) return report = {ENTRY_OUTSIDE, 0, {room, x}, {0, 0, i}}, -1;
            if (x > last_block) continue;
            int64_t begin = x * block, end = last - begin < block ? last + 1 : begin + block;
            if (end > room) {
                int64_t first = begin > room ? begin : room;
                return report = {POSITION_OUTSIDE, 0, {room, first}, {0, 0, i * block + first - begin}}, -1;
            }
            keys = i * block + end - begin;
            for (int64_t column = column_of(begin); table != nullptr && column * set.page_size < end; column++) {
                int64_t page = page_of(column);
                if (page >= 0 && page < set.num_pages) continue;
                return report = {LISTED_PAGE_OUTSIDE, 0, {set.num_pages, page}, {0, 0, column}}, -1;
            }
        }
        return keys;
    }
};

}  // namespace
