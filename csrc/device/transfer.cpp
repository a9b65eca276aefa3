#include "device/transfer.h"

#include "library/context.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace {

// The device of this machine whose own memory holds `tensor`, or null. Copies of a worker's memory are complete on return.
ggml_backend_dev_t device_of(const ggml_tensor * tensor) {
    ggml_backend_buffer_t      buffer = buffer_of(tensor);
    ggml_backend_buffer_type_t type   = ggml_backend_buffer_get_type(buffer);
    ggml_backend_dev_t         owner  = ggml_backend_buft_get_device(type);
    const bool is_own = owner != nullptr && !ggml_backend_buffer_is_host(buffer) &&
                        type == ggml_backend_dev_buffer_type(owner) &&
                        std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(owner)), "RPC") != 0;
    return is_own ? owner : nullptr;
}

// On `stream`, or at once without one.
void set_pieces(ggml_backend_t stream, const copy_region & to, const uint8_t * src) {
    if (stream != nullptr) {
        ggml_backend_tensor_set_2d_async(stream, to.tensor, src, to.offset, to.size, to.count, to.stride, to.pitch);
    } else {
        ggml_backend_tensor_set_2d(to.tensor, src, to.offset, to.size, to.count, to.stride, to.pitch);
    }
}

}  // namespace

// Devices copy pieces in one call only if they lie less than this apart (CUDA: its largest pitch).
constexpr size_t max_apart = size_t(INT32_MAX);

transfer::transfer(llama_context * context, const std::vector<ggml_tensor *> & tensors,
                   const std::vector<copy_region> & staged, const host_arena & pinned, size_t lag)
    : ctx(context), pinned(pinned), pretends(lag > 0), done(lag) {
    if (!open_lanes(tensors)) {
        lanes.clear();
        return;
    }
    std::vector<ggml_backend_t> streams;
    for (const lane & lane : lanes) {
        streams.push_back(lane.copies.get());
        streams.push_back(lane.leaves.get());
    }
    done = copy_progress(std::move(streams));
    open_stages(staged);
}

// False unless all tensors lie on devices that copy during computation.
bool transfer::open_lanes(const std::vector<ggml_tensor *> & tensors) {
    for (const ggml_tensor * tensor : tensors) {
        ggml_backend_dev_t device = device_of(tensor);
        if (device == nullptr) {
            return false;
        }
        if (std::any_of(lanes.begin(), lanes.end(), [&](const lane & lane) { return lane.device == device; })) {
            continue;
        }
        ggml_backend_dev_props props{};
        ggml_backend_dev_get_props(device, &props);
        ggml_backend_t compute = library::backend_of(ctx, device);
        if (compute == nullptr || !props.caps.async || !props.caps.events) {
            return false;
        }
        const auto event  = [&] { return event_handle(ggml_backend_event_new(device)); };
        const auto stream = [&] { return backend_handle(ggml_backend_dev_init(device, nullptr)); };
        lane       opened{ device, compute, event(), event(), event(), {}, 0, 0, stream(), stream() };
        if (!opened.computed || !opened.copied || !opened.left || !opened.copies || !opened.leaves) {
            return false;
        }
        lanes.push_back(std::move(opened));
    }
    return !lanes.empty();
}

void transfer::open_stages(const std::vector<copy_region> & staged) {
    has_stages = !staged.empty();
    for (lane & lane : lanes) {
        size_t all     = 0;
        size_t largest = 0;
        for (const copy_region & region : staged) {
            if (&lane_of(region.tensor) == &lane) {
                all += region.total();
                largest = std::max(largest, region.total());
            }
        }
        if (largest > 0) {
            lane.room  = std::max(std::min(all, max_stage), largest);
            lane.stage = zeros_or_none(ggml_backend_dev_buffer_type(lane.device), lane.room + largest);
            has_stages = has_stages && lane.stage.buffer != nullptr;
        }
    }
}

transfer::lane & transfer::lane_of(const ggml_tensor * tensor) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer_of(tensor)));
    return *std::find_if(lanes.begin(), lanes.end(), [&](const lane & lane) { return lane.device == device; });
}

// Calls `copy(index of the first piece, how many, offset in a piece, bytes)` so that no call crosses from one registered
// range of host memory into the next, with as many whole pieces in one call as possible.
template <typename F>
void transfer::each_contiguous(const copy_region & region, const uint8_t * host, const F & copy) const {
    for (size_t i = 0; i < region.count;) {
        const uint8_t * at   = host + i * region.pitch;
        const size_t    room = pinned.contiguous(at, (region.count - i - 1) * region.pitch + region.size);
        if (room >= region.size) {
            const bool   joins = region.pitch > 0 && region.pitch <= max_apart && region.stride <= max_apart;
            const size_t whole = joins ? std::min(region.count - i, (room - region.size) / region.pitch + 1) : 1;
            copy(i, whole, size_t(0), region.size);
            i += whole;
            continue;
        }
        for (size_t done = 0; done < region.size;) {
            const size_t part = pinned.contiguous(at + done, region.size - done);
            copy(i, size_t(1), done, part);
            done += part;
        }
        ++i;
    }
}

void transfer::save_begin() {
    if (lanes.empty()) {
        llama_synchronize(ctx);
    }
    for (lane & lane : lanes) {
        ggml_backend_event_record(lane.computed.get(), lane.compute);
        ggml_backend_event_wait(lane.copies.get(), lane.computed.get());
    }
}

void transfer::save(const copy_region & from, uint8_t * dst) {
    save_by(lanes.empty() ? nullptr : lane_of(from.tensor).copies.get(), from, dst);
}

void transfer::save_by(ggml_backend_t stream, const copy_region & from, uint8_t * dst) {
    dst += from.place;
    each_contiguous(from, dst, [&](size_t i, size_t count, size_t skip, size_t size) {
        const size_t offset = from.offset + i * from.stride + skip;
        uint8_t *    out    = dst + i * from.pitch + skip;
        if (stream != nullptr) {
            ggml_backend_tensor_get_2d_async(stream, from.tensor, out, offset, size, count, from.stride, from.pitch);
        } else {
            ggml_backend_tensor_get_2d(from.tensor, out, offset, size, count, from.stride, from.pitch);
        }
    });
}

void transfer::save_staged(const std::vector<copy_region> & from, uint8_t * dst) {
    if (!has_stages) {
        save_begin();
        for (const copy_region & region : from) {
            save(region, dst);
        }
        load_end();
        return;
    }
    std::vector<staged_part> parts;
    size_t                   end = 0;
    wait_for_stages();
    for (const copy_region & region : from) {
        lane & place = lane_of(region.tensor);
        if (place.filled + region.total() > place.room) {
            empty_stages(parts, dst);
            wait_for_stages();
        }
        const ggml_tensor source = bytes_of(region.tensor, region.offset, region.total());
        ggml_tensor       target = bytes_of(&place.stage.bytes, place.filled, region.total());
        ggml_backend_tensor_copy_async(place.compute, place.compute, &source, &target);
        const bool follows = !parts.empty() && parts.back().place == &place && parts.back().bytes.end() == region.place;
        if (follows && parts.back().bytes.count * region.count == 1) {
            parts.back().bytes.size += region.size;
        } else {
            parts.push_back({ &place, { &place.stage.bytes, place.filled, region.size, region.count, region.size, region.pitch, region.place } });
        }
        place.filled += region.total();
        end = std::max(end, region.end());
    }
    empty_stages(parts, dst);
    forget_left();
    leaving.push_back({ dst, dst + end, done.take() });
}

// The next work on the streams that compute waits until the stages have left, and may fill them then.
void transfer::wait_for_stages() {
    for (lane & lane : lanes) {
        ggml_backend_event_wait(lane.compute, lane.left.get());
    }
}

// Sends `parts`, the content of the stages, to `dst`, each in one piece.
void transfer::empty_stages(std::vector<staged_part> & parts, uint8_t * dst) {
    for (lane & lane : lanes) {
        ggml_backend_event_record(lane.computed.get(), lane.compute);
        ggml_backend_event_wait(lane.leaves.get(), lane.computed.get());
    }
    for (const auto & [place, bytes] : parts) {
        save_by(place->leaves.get(), bytes, dst);
    }
    for (lane & lane : lanes) {
        ggml_backend_event_record(lane.left.get(), lane.leaves.get());
        lane.filled = 0;
    }
    parts.clear();
}

void transfer::forget_left() {
    while (!leaving.empty() && done.is_complete(leaving.front().ticket)) {
        leaving.pop_front();
    }
}

// A device's own way to set memory waits for it, for each tensor; copying zeros on the stream that computes does not.
void transfer::wipe(const std::vector<copy_region> & regions) {
    if (!has_stages) {
        finish();
        llama_synchronize(ctx);
        for (const copy_region & region : regions) {
            if (library::can_be_set(buffer_of(region.tensor))) {
                ggml_backend_tensor_memset(region.tensor, 0, region.offset, region.total());
            }
        }
        return;
    }
    for (const copy_region & region : regions) {
        const lane & lane = lane_of(region.tensor);
        for (size_t done = 0, n; done < region.total(); done += n) {
            n                        = std::min(lane.stage.size() - lane.room, region.total() - done);
            const ggml_tensor zeros  = bytes_of(&lane.stage.bytes, lane.room, n);
            ggml_tensor       target = bytes_of(region.tensor, region.offset + done, n);
            ggml_backend_tensor_copy_async(lane.compute, lane.compute, &zeros, &target);
        }
    }
}

void transfer::load(const copy_region & to, const uint8_t * src) {
    ggml_backend_t  copies = lanes.empty() ? nullptr : lane_of(to.tensor).copies.get();
    const uint8_t * end    = src + to.end();
    src += to.place;
    forget_left();
    if (std::any_of(leaving.begin(), leaving.end(), [&](const range & each) { return each.first < end && src < each.last; })) {
        for (const lane & each : lanes) {
            ggml_backend_event_wait(copies, each.left.get());
        }
    }
    each_contiguous(to, src, [&](size_t i, size_t count, size_t skip, size_t size) {
        set_pieces(copies, { to.tensor, to.offset + i * to.stride + skip, size, count, to.stride, to.pitch },
                   src + i * to.pitch + skip);
    });
}

void transfer::put(const copy_region & to, const uint8_t * src) {
    set_pieces(lanes.empty() ? nullptr : lane_of(to.tensor).compute, to, src);
}

void transfer::load_end() {
    for (lane & lane : lanes) {
        ggml_backend_event_record(lane.copied.get(), lane.copies.get());
        ggml_backend_event_wait(lane.compute, lane.copied.get());
    }
}

void transfer::move_begin() {
    if (lanes.empty()) {
        llama_synchronize(ctx);
    }
}

void transfer::move(const copy_region & from, const copy_region & to) {
    ggml_backend_t compute = lanes.empty() ? nullptr : lane_of(from.tensor).compute;
    const bool     is_one  = from.stride == from.size && to.stride == to.size;
    const size_t   size    = is_one ? from.total() : from.size;
    for (size_t i = 0; i < (is_one ? 1 : from.count); ++i) {
        const ggml_tensor source = bytes_of(from.tensor, from.offset + i * from.stride, size);
        ggml_tensor       target = bytes_of(to.tensor, to.offset + i * to.stride, size);
        if (compute != nullptr) {
            ggml_backend_tensor_copy_async(compute, compute, &source, &target);
        } else {
            ggml_backend_tensor_copy(&source, &target);
        }
    }
}

void transfer::finish() {
    for (lane & lane : lanes) {
        ggml_backend_synchronize(lane.copies.get());
        ggml_backend_synchronize(lane.leaves.get());
    }
    leaving.clear();
    done.all_complete();
}
