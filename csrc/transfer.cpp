#include "transfer.h"

#include "llama-context.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

// The device whose own memory holds all `tensors`, or null.
ggml_backend_dev_t only_device(const std::vector<ggml_tensor *> & tensors) {
    ggml_backend_dev_t device = nullptr;
    for (const ggml_tensor * tensor : tensors) {
        ggml_backend_buffer_t      buffer = buffer_of(tensor);
        ggml_backend_buffer_type_t type   = ggml_backend_buffer_get_type(buffer);
        ggml_backend_dev_t         owner  = ggml_backend_buft_get_device(type);
        if (owner == nullptr || ggml_backend_buffer_is_host(buffer) || type != ggml_backend_dev_buffer_type(owner) ||
            (device != nullptr && owner != device)) {
            return nullptr;
        }
        device = owner;
    }
    return device;
}

ggml_backend_t backend_of(ggml_backend_sched_t scheduler, ggml_backend_dev_t device) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(scheduler, i);
        if (ggml_backend_get_device(backend) == device) {
            return backend;
        }
    }
    return nullptr;
}

}  // namespace

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
}

ggml_tensor bytes_of(const ggml_tensor * tensor, size_t offset, size_t size) {
    ggml_tensor bytes{};
    bytes.type   = GGML_TYPE_I8;
    bytes.buffer = buffer_of(tensor);
    bytes.data   = static_cast<uint8_t *>(tensor->data) + offset;
    bytes.ne[0]  = static_cast<int64_t>(size);
    bytes.nb[0]  = 1;
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        bytes.ne[i] = 1;
        bytes.nb[i] = size;
    }
    return bytes;
}

transfer::transfer(llama_context * context, const std::vector<ggml_tensor *> & tensors, size_t staged,
                   const host_arena & pinned, size_t lag)
    : ctx(context), pinned(pinned), pretends(lag > 0), done(lag) {
    ggml_backend_dev_t device = only_device(tensors);
    if (device == nullptr) {
        return;
    }
    compute = backend_of(ctx->get_sched(), device);
    ggml_backend_dev_props props{};
    ggml_backend_dev_get_props(device, &props);
    if (compute == nullptr || !props.caps.async || !props.caps.events) {
        return;
    }
    computed.reset(ggml_backend_event_new(device));
    copied.reset(ggml_backend_event_new(device));
    if (computed == nullptr || copied == nullptr) {
        return;
    }
    copy_backend.reset(ggml_backend_dev_init(device, nullptr));
    if (copy_backend == nullptr) {
        return;
    }
    done = copy_progress(copy_backend.get(), device);
    if (staged == 0) {
        return;
    }
    stage_buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), staged));
    if (stage_buffer != nullptr) {
        stage.buffer = stage_buffer.get();
        stage.data   = ggml_backend_buffer_get_base(stage_buffer.get());
        stage        = bytes_of(&stage, 0, staged);
    }
}

transfer::~transfer() {
    finish();
}

// Calls `copy(index of the first piece, how many, offset in a piece, bytes)` so that no call crosses from one registered
// range of host memory into the next, with as many whole pieces in one call as possible.
template <typename F>
void transfer::each_contiguous(const copy_region & region, const uint8_t * host, const F & copy) const {
    for (size_t i = 0; i < region.count;) {
        const uint8_t * at   = host + i * region.pitch;
        const size_t    room = pinned.contiguous(at, (region.count - i - 1) * region.pitch + region.size);
        if (room >= region.size) {
            const size_t whole = region.pitch > 0 ? std::min(region.count - i, (room - region.size) / region.pitch + 1) : 1;
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
    if (copy_backend == nullptr) {
        llama_synchronize(ctx);
        return;
    }
    ggml_backend_event_record(computed.get(), compute);
    ggml_backend_event_wait(copy_backend.get(), computed.get());
}

void transfer::save(const copy_region & from, uint8_t * dst) {
    each_contiguous(from, dst, [&](size_t i, size_t count, size_t skip, size_t size) {
        const size_t offset = from.offset + i * from.stride + skip;
        uint8_t *    out    = dst + i * from.pitch + skip;
        if (copy_backend != nullptr) {
            ggml_backend_tensor_get_2d_async(copy_backend.get(), from.tensor, out, offset, size, count, from.stride, from.pitch);
            return;
        }
        for (size_t j = 0; j < count; ++j) {
            ggml_backend_tensor_get(from.tensor, out + j * from.pitch, offset + j * from.stride, size);
        }
    });
}

void transfer::save_staged(const std::vector<copy_region> & from, uint8_t * dst) {
    if (stage_buffer == nullptr) {
        save_begin();
        for (const copy_region & region : from) {
            save(region, dst);
            dst += region.size;
        }
        load_end();  // what comes next may overwrite the tensors
        return;
    }
    // The stage is free again when its last content has left it.
    ggml_backend_event_wait(compute, copied.get());
    size_t at = 0;
    for (const copy_region & region : from) {
        const ggml_tensor source = bytes_of(region.tensor, region.offset, region.size);
        ggml_tensor       target = bytes_of(&stage, at, region.size);
        ggml_backend_tensor_copy_async(compute, compute, &source, &target);
        at += region.size;
    }
    save_begin();
    save({ &stage, 0, at }, dst);
    ggml_backend_event_record(copied.get(), copy_backend.get());
}

void transfer::reserve(const std::vector<copy_region> & regions, size_t count) {
    std::vector<ggml_backend_buffer_type_t> types;
    for (const copy_region & region : regions) {
        ggml_backend_buffer_type_t type  = ggml_backend_buffer_get_type(buffer_of(region.tensor));
        const size_t               index = std::find(types.begin(), types.end(), type) - types.begin();
        if (index == types.size()) {
            types.push_back(type);
            kept.push_back({ nullptr, 0 });
        }
        pieces.push_back({ index, kept[index].stride, region.size });
        kept[index].stride += region.size;
    }
    for (size_t i = 0; i < types.size(); ++i) {
        const size_t size = kept[i].stride * count;
        kept[i].buffer.reset(ggml_backend_buft_alloc_buffer(types[i], size));
        if (kept[i].buffer == nullptr) {
            throw std::runtime_error("no room for " + std::to_string(size) + " bytes of states to go back to in " +
                                     ggml_backend_buft_name(types[i]));
        }
    }
}

ggml_tensor transfer::kept_bytes(size_t index, size_t i) const {
    const kept_piece &    piece  = pieces.at(i);
    ggml_backend_buffer_t buffer = kept[piece.buffer].buffer.get();
    ggml_tensor           whole{};
    whole.buffer = buffer;
    whole.data   = ggml_backend_buffer_get_base(buffer);
    return bytes_of(&whole, index * kept[piece.buffer].stride + piece.offset, piece.size);
}

// On the device's own stream where there is one, after what it was given so far and before what it is given next.
void transfer::copy(const ggml_tensor & from, ggml_tensor & to) {
    if (copy_backend != nullptr) {
        ggml_backend_tensor_copy_async(compute, compute, &from, &to);
    } else {
        llama_synchronize(ctx);
        ggml_backend_tensor_copy(&from, &to);
    }
}

void transfer::keep(const std::vector<copy_region> & from, size_t index) {
    if (from.size() != pieces.size()) {
        throw std::runtime_error("llama.cpp wrote a state in another way than before");
    }
    for (size_t i = 0; i < from.size(); ++i) {
        if (from[i].size != pieces[i].size) {
            throw std::runtime_error("llama.cpp wrote a state in another way than before");
        }
        ggml_tensor target = kept_bytes(index, i);
        copy(bytes_of(from[i].tensor, from[i].offset, from[i].size), target);
    }
}

void transfer::put_back(size_t index, size_t i, const copy_region & to) {
    if (i >= pieces.size() || to.size != pieces[i].size) {
        throw std::runtime_error("llama.cpp reads a state in another way than it was written");
    }
    ggml_tensor target = bytes_of(to.tensor, to.offset, to.size);
    copy(kept_bytes(index, i), target);
}

void transfer::load_begin() {
    llama_synchronize(ctx);
}

void transfer::load(const copy_region & to, const uint8_t * src) {
    each_contiguous(to, src, [&](size_t i, size_t count, size_t skip, size_t size) {
        const size_t    offset = to.offset + i * to.stride + skip;
        const uint8_t * in     = src + i * to.pitch + skip;
        if (copy_backend != nullptr) {
            ggml_backend_tensor_set_2d_async(copy_backend.get(), to.tensor, in, offset, size, count, to.stride, to.pitch);
            return;
        }
        for (size_t j = 0; j < count; ++j) {
            ggml_backend_tensor_set(to.tensor, in + j * to.pitch, offset + j * to.stride, size);
        }
    });
}

void transfer::load_end() {
    if (copy_backend != nullptr) {
        ggml_backend_event_record(copied.get(), copy_backend.get());
        ggml_backend_event_wait(compute, copied.get());
    }
}

void transfer::move(const copy_region & from, const copy_region & to) {
    const bool on_host = ggml_backend_buffer_is_host(buffer_of(from.tensor));
    for (size_t i = 0; i < from.count; ++i) {
        const ggml_tensor source = bytes_of(from.tensor, from.offset + i * from.stride, from.size);
        ggml_tensor       target = bytes_of(to.tensor, to.offset + i * to.stride, to.size);
        if (copy_backend != nullptr) {
            ggml_backend_tensor_copy_async(copy_backend.get(), copy_backend.get(), &source, &target);
        } else if (on_host) {
            std::memcpy(target.data, source.data, from.size);
        } else {
            ggml_backend_tensor_copy(&source, &target);
        }
    }
}

void transfer::finish() {
    if (copy_backend != nullptr) {
        ggml_backend_synchronize(copy_backend.get());
    }
    done.all_complete();
}
