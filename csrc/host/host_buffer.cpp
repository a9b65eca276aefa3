// Host memory for saved rows and states: from the arena if there is one, plain otherwise.
#include "host/host_arena.h"

#include <pybind11/pybind11.h>
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace py = pybind11;

namespace {

// From this size on, plain memory is mapped and unmapped block by block. The C library would keep
// freed blocks between live ones: half as much again as the blocks of a full cache.
constexpr size_t own_pages = 256 << 10;

class host_buffer {
public:
    host_buffer(size_t size, bool pinned) : size_(size) {
        if (size == 0) {
            throw std::invalid_argument("a host buffer needs at least one byte");
        }
        data_   = pinned ? host_arena::instance().allocate(size) : nullptr;
        pinned_ = data_ != nullptr;
        if (pinned_) {
            return;
        }
        if (size >= own_pages) {
            data_   = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                           0);
            mapped_ = data_ != MAP_FAILED;
        }
        if (!mapped_) {  // small, or the system has no more mappings
            constexpr size_t alignment = 64;
            data_ = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
        }
        if (data_ == nullptr) {
            throw std::bad_alloc();
        }
        host_arena::instance().count_outside(static_cast<std::ptrdiff_t>(size_));
    }

    ~host_buffer() {
        if (pinned_) {
            host_arena::instance().free(data_, size_);
            return;
        }
        if (mapped_) {
            munmap(data_, size_);
        } else {
            std::free(data_);
        }
        host_arena::instance().count_outside(-static_cast<std::ptrdiff_t>(size_));
    }

    host_buffer(const host_buffer &)             = delete;
    host_buffer & operator=(const host_buffer &) = delete;

    void * data() const { return data_; }
    size_t size() const { return size_; }
    bool   pinned() const { return pinned_; }

private:
    size_t size_;
    void * data_   = nullptr;
    bool   pinned_ = false;
    bool   mapped_ = false;
};

}  // namespace

void register_host_buffer(py::module_ & m) {
    py::class_<host_buffer>(m, "HostBuffer", py::buffer_protocol())
        // Memory that is not ready yet takes long and touches no Python object.
        .def(py::init<size_t, bool>(), py::arg("size"), py::arg("pinned") = true,
             py::call_guard<py::gil_scoped_release>())
        .def_static("open",
                    [](size_t limit, size_t ahead, size_t initial, bool registered) {
                        return host_arena::instance().open(limit, ahead, initial, registered);
                    },
                    py::arg("limit"), py::arg("ahead"), py::arg("initial") = 0,
                    py::arg("registered") = true)
        .def_static("used", [] { return host_arena::instance().used(); })
        .def_static("held", [] { return host_arena::instance().held(); })
        .def_static("stop", [] { host_arena::instance().stop(); },
                    py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("pinned", &host_buffer::pinned)
        .def("__len__", &host_buffer::size)
        .def_buffer([](host_buffer & self) {
            return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(), 1,
                                   { static_cast<py::ssize_t>(self.size()) }, { py::ssize_t(1) });
        });
}
