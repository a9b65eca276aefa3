#include "core/row_positions.h"

#include <algorithm>
#include <iterator>
#include <limits>

// The last image that starts before `row`; null for none.
const row_positions::image * row_positions::before(int64_t row) const {
    const auto after = std::lower_bound(images.begin(), images.end(), row, [](const image & i, int64_t n) { return i.row < n; });
    return after == images.begin() ? nullptr : &*std::prev(after);
}

int64_t row_positions::position(int64_t row) const {
    const image * last = before(row + 1);
    if (last == nullptr) {
        return row;
    }
    return row < last->end() ? last->pos : last->pos + last->n_positions() + row - last->end();
}

int64_t row_positions::row_of(int64_t pos, const cell_extra & ext) const {
    const auto after = std::upper_bound(images.begin(), images.end(), pos, [](int64_t p, const image & i) { return p < i.pos; });
    if (after == images.begin()) {
        return pos;
    }
    const image & last = *std::prev(after);
    return pos == last.pos ? last.row + (ext.y - pos) * last.columns + (ext.x - pos)
                           : last.end() + pos - last.pos - last.n_positions();
}

int64_t row_positions::end_of(int64_t pos) const {
    for (auto last = images.rbegin(); last != images.rend(); ++last) {
        if (pos == last->pos) {
            return last->end();
        }
        if (pos > last->pos) {
            return last->end() + pos + 1 - last->pos - last->n_positions();
        }
    }
    return pos + 1;
}

bool row_positions::is_inside(int64_t n) const {
    const image * last = before(n);
    return last != nullptr && n < last->end();
}

int64_t row_positions::next_image(int64_t n) const {
    const auto next = std::find_if(images.begin(), images.end(), [n](const image & i) { return i.end() > n; });
    return next == images.end() ? std::numeric_limits<int64_t>::max() : std::max(next->row, n);
}

void row_positions::truncate(int64_t n) {
    while (!images.empty() && images.back().row >= n) {
        images.pop_back();
    }
    if (!images.empty()) {
        images.back().count = std::min(images.back().count, n - images.back().row);
    }
}

void row_positions::add_image(int64_t pos, int64_t columns, int64_t count) {
    if (!images.empty() && images.back().pos == pos) {
        images.back().columns = columns;  // of a block with a part of its first line, only that much was known
        images.back().count += count;
    } else {
        images.push_back({ end_of(pos - 1), pos, columns, count });
    }
}

bool row_positions::append(int64_t row, const cell_extra & ext) {
    image * last = !images.empty() && images.back().end() == row ? &images.back() : nullptr;
    if (last != nullptr && ext.token < 0) {
        const int64_t x = int64_t(ext.x) - last->pos, y = int64_t(ext.y) - last->pos;
        const bool    is_wider = last->count == last->columns && y == 0 && x == last->columns;  // the first line goes on
        if (is_wider || (y == last->count / last->columns && x == last->count % last->columns)) {
            last->columns += is_wider;
            ++last->count;
            return true;
        }
    }
    if (last != nullptr && !last->is_whole()) {
        return false;
    }
    const int64_t pos = position(row);
    if (ext.x != pos || ext.y != pos) {
        return false;
    }
    if (ext.token < 0) {  // an image may have only this row, and then positions go on as after text
        images.push_back({ row, pos, 1, 1 });
    }
    return true;
}
