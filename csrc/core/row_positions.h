// Which position each row of a sequence has. A row of text has the one after the row before it. All rows of an
// image have the position at which it starts, and a line and a column; the text goes on as many positions later
// as the image has lines or columns, whichever are more. So there may be more rows than positions.
#pragma once

#include "library/cells.h"

class row_positions {
public:
    bool has_images() const { return !images.empty(); }

    // Of a row that is there, or of the next one, if that is text or starts an image.
    int64_t position(int64_t row) const;

    // The row of a cell.
    int64_t row_of(int64_t pos, const cell_extra & ext) const;

    // How many rows a sequence has whose last position is `pos`; -1 for none.
    int64_t end_of(int64_t pos) const;

    // Whether row n and the one before it belong to one image.
    bool is_inside(int64_t n) const;

    // The first row from n on that belongs to an image, INT64_MAX for none.
    int64_t next_image(int64_t n) const;

    // Forgets spans that start at row n or later, and the part of others from there on.
    void truncate(int64_t n);

    // The `count` rows after the last one are at `pos`, and belong to an image with so many columns.
    void add_image(int64_t pos, int64_t columns, int64_t count);

    // Row `row`, the next one, has its cell's position: false if it cannot follow those before.
    bool append(int64_t row, const cell_extra & ext);

private:
    // Rows [row, row + count). Of those with one line so far, `columns` is how many these are at least.
    struct image {
        int64_t row, pos, columns, count;

        int64_t end() const { return row + count; }
        bool    is_whole() const { return count % columns == 0; }
        int64_t n_positions() const { return count / columns > columns ? count / columns : columns; }
    };

    const image * before(int64_t row) const;

    std::vector<image> images;
};
