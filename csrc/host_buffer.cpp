// Host memory that a device copies to and from at full speed: pinned where a device offers it, plain otherwise.
#include "ggml-backend.h"

#include <pybind11/pybind11.h>

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

namespace py = pybind11;

namespace {

// Pinned buffers that were released and wait to be used again: a driver takes longer to make one than to copy its bytes.
class buffer_pool {
public:
    static buffer_pool & instance() {
        static buffer_pool pool;
        return pool;
    }

    void set_limit(size_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        limit_ = bytes;
        while (total_ > limit_) {
            drop(std::prev(free_.end()));
        }
    }

    // How many would be taken for `size` bytes: those that hold them and waste at most an eighth.
    size_t count(size_t size) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return std::distance(free_.lower_bound(size), free_.upper_bound(size + size / 8));
    }

    // The smallest of these, or null.
    ggml_backend_buffer_t take(size_t size) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto                        found = free_.lower_bound(size);
        if (found == free_.end() || found->first > size + size / 8) {
            return nullptr;
        }
        ggml_backend_buffer_t buffer = found->second;
        total_ -= found->first;
        free_.erase(found);
        return buffer;
    }

    void give(ggml_backend_buffer_t buffer) {
        const size_t size = ggml_backend_buffer_get_size(buffer);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            // Large ones are odd sizes; small ones come again.
            while (total_ + size > limit_ && !free_.empty() && free_.rbegin()->first > size) {
                drop(std::prev(free_.end()));
            }
            if (total_ + size <= limit_) {
                free_.emplace(size, buffer);
                total_ += size;
                return;
            }
        }
        ggml_backend_buffer_free(buffer);
    }

private:
    void drop(std::multimap<size_t, ggml_backend_buffer_t>::iterator which) {
        ggml_backend_buffer_free(which->second);
        total_ -= which->first;
        free_.erase(which);
    }

    std::mutex                                     mutex_;
    std::multimap<size_t, ggml_backend_buffer_t> free_;
    size_t                                         total_ = 0;
    size_t                                         limit_ = 0;
};

class host_buffer {
public:
    host_buffer(size_t size, bool pinned) : size_(size) {
        if (size == 0) {
            throw std::invalid_argument("a host buffer needs at least one byte");
        }
        if (pinned) {
            allocate_pinned();
        }
        if (data_ == nullptr) {
            constexpr size_t alignment = 64;
            data_ = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
            if (data_ == nullptr) {
                throw std::bad_alloc();
            }
        }
    }

    ~host_buffer() {
        if (buffer_ != nullptr) {
            buffer_pool::instance().give(buffer_);
        } else {
            std::free(data_);
        }
    }

    host_buffer(const host_buffer &)             = delete;
    host_buffer & operator=(const host_buffer &) = delete;

    void * data() const { return data_; }
    size_t size() const { return size_; }
    bool   pinned() const { return buffer_ != nullptr; }

private:
    void allocate_pinned() {
        buffer_ = buffer_pool::instance().take(size_);
        for (size_t i = 0; buffer_ == nullptr && i < ggml_backend_dev_count(); ++i) {
            ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(ggml_backend_dev_get(i));
            if (type != nullptr) {
                buffer_ = ggml_backend_buft_alloc_buffer(type, size_);
            }
        }
        if (buffer_ != nullptr) {
            data_ = ggml_backend_buffer_get_base(buffer_);
        }
    }

    size_t                size_;
    void *                data_   = nullptr;
    ggml_backend_buffer_t buffer_ = nullptr;
};

}  // namespace

void register_host_buffer(py::module_ & m) {
    py::class_<host_buffer>(m, "HostBuffer", py::buffer_protocol())
        // Pinning takes long and touches no Python object.
        .def(py::init<size_t, bool>(), py::arg("size"), py::arg("pinned") = true,
             py::call_guard<py::gil_scoped_release>())
        .def_static("keep", [](size_t bytes) { buffer_pool::instance().set_limit(bytes); }, py::arg("bytes"),
                    py::call_guard<py::gil_scoped_release>())
        .def_static("kept", [](size_t size) { return buffer_pool::instance().count(size); }, py::arg("size"))
        .def_property_readonly("pinned", &host_buffer::pinned)
        .def("__len__", &host_buffer::size)
        .def_buffer([](host_buffer & self) {
            return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(), 1,
                                   { static_cast<py::ssize_t>(self.size()) }, { py::ssize_t(1) });
        });
}
