// Host memory that a device copies to and from at full speed: pinned where a device offers it, plain otherwise.
#include "ggml-backend.h"

#include <pybind11/pybind11.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace py = pybind11;

namespace {

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
            ggml_backend_buffer_free(buffer_);
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
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(ggml_backend_dev_get(i));
            if (type == nullptr) {
                continue;
            }
            buffer_ = ggml_backend_buft_alloc_buffer(type, size_);
            if (buffer_ != nullptr) {
                data_ = ggml_backend_buffer_get_base(buffer_);
                return;
            }
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
        .def_property_readonly("pinned", &host_buffer::pinned)
        .def("__len__", &host_buffer::size)
        .def_buffer([](host_buffer & self) {
            return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(), 1,
                                   { static_cast<py::ssize_t>(self.size()) }, { py::ssize_t(1) });
        });
}
