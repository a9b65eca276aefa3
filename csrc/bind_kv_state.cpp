// Registers KVState: unpacks Python objects, checks buffers, releases the GIL around the copies.
#include "kv_state.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

namespace py = pybind11;

namespace {

py::buffer_info bytes_of(const py::buffer & buffer, bool writable) {
    py::buffer_info info = buffer.request(writable);
    py::ssize_t     step = info.itemsize;
    for (py::ssize_t i = info.ndim - 1; i >= 0; --i) {
        if (info.shape[i] > 1 && info.strides[i] != step) {
            throw py::value_error("the buffer is not contiguous");
        }
        step *= info.shape[i];
    }
    return info;
}

// A kv_state and the buffers that its copies have yet to read or fill.
struct bound_state {
    bound_state(uintptr_t ctx, llama_seq_id seq) : state(reinterpret_cast<llama_context *>(ctx), seq) {}

    void hold(py::buffer_info && info) {
        if (state.is_async()) {
            in_flight.push_back(std::move(info));
        }
    }

    void finish() {
        {
            const py::gil_scoped_release release;
            state.finish();
        }
        in_flight.clear();
    }

    ~bound_state() { state.finish(); }

    kv_state                     state;
    std::vector<py::buffer_info> in_flight;
};

size_t n_bytes(const py::buffer_info & info) {
    return static_cast<size_t>(info.size) * static_cast<size_t>(info.itemsize);
}

}  // namespace

void register_kv_state(py::module_ & m) {
    py::class_<bound_state>(m, "KVState")
        .def(py::init<uintptr_t, llama_seq_id>(), py::arg("ctx"), py::arg("seq") = 0)
        .def_property_readonly("kind",
                               [](const bound_state & self) {
                                   switch (self.state.kind()) {
                                       case memory_kind::attention: return "attention";
                                       case memory_kind::hybrid:    return "hybrid";
                                       default:                     return "whole";
                                   }
                               })
        .def_property_readonly("layout", [](const bound_state & self) { return self.state.describe(); })
        .def_property_readonly("layout_hash", [](const bound_state & self) { return self.state.layout(); })
        .def_property_readonly("row_bytes", [](const bound_state & self) { return self.state.row_bytes(); })
        .def_property_readonly("n_layers", [](const bound_state & self) { return self.state.n_layers(); })
        .def_property_readonly("transposed", [](const bound_state & self) { return self.state.transposed(); })
        .def_property_readonly("beside", [](const bound_state & self) { return self.state.is_async(); })
        .def_property_readonly("is_async", [](const bound_state & self) { return self.state.is_async(); })
        .def("n_rows", [](const bound_state & self, llama_seq_id seq) { return self.state.n_rows(seq); }, py::arg("seq"))
        .def("ordered", [](const bound_state & self, llama_seq_id seq) { return self.state.ordered(seq); }, py::arg("seq"))
        .def("rows_size", [](const bound_state & self, int64_t p0, int64_t p1) { return self.state.rows_size(p0, p1); },
             py::arg("p0"), py::arg("p1"))
        .def("save_rows",
             [](bound_state & self, llama_seq_id seq, int64_t p0, int64_t p1, const py::buffer & out) {
                 py::buffer_info info = bytes_of(out, true);
                 {
                     // The copies touch no Python object; `info` keeps the buffer alive.
                     const py::gil_scoped_release release;
                     self.state.save_rows(seq, p0, p1, static_cast<uint8_t *>(info.ptr), n_bytes(info));
                 }
                 self.hold(std::move(info));
             },
             py::arg("seq"), py::arg("p0"), py::arg("p1"), py::arg("out"))
        .def("load_rows",
             [](bound_state & self, llama_seq_id seq, int64_t p0, const std::vector<std::tuple<py::buffer, int64_t, int64_t>> & spans) {
                 std::vector<py::buffer_info> infos;
                 std::vector<row_span>        parts;
                 infos.reserve(spans.size());
                 for (const auto & [buffer, first, last] : spans) {
                     infos.push_back(bytes_of(buffer, false));
                     parts.push_back({ static_cast<const uint8_t *>(infos.back().ptr), n_bytes(infos.back()), first, last });
                 }
                 {
                     const py::gil_scoped_release release;
                     self.state.load_rows(seq, p0, parts);
                 }
                 for (py::buffer_info & info : infos) {
                     self.hold(std::move(info));
                 }
             },
             py::arg("seq"), py::arg("p0"), py::arg("spans"))
        .def("state_size", [](const bound_state & self, llama_seq_id seq) { return self.state.state_size(seq); }, py::arg("seq"))
        .def("save_state",
             [](bound_state & self, llama_seq_id seq, int64_t n, const py::buffer & out) {
                 py::buffer_info info = bytes_of(out, true);
                 {
                     const py::gil_scoped_release release;
                     self.state.save_state(seq, n, static_cast<uint8_t *>(info.ptr), n_bytes(info));
                 }
                 self.hold(std::move(info));
             },
             py::arg("seq"), py::arg("n"), py::arg("out"))
        .def("load_state",
             [](bound_state & self, llama_seq_id seq, int64_t n, const py::buffer & data) {
                 py::buffer_info info = bytes_of(data, false);
                 {
                     const py::gil_scoped_release release;
                     self.state.load_state(seq, n, static_cast<const uint8_t *>(info.ptr), n_bytes(info));
                 }
                 self.hold(std::move(info));
             },
             py::arg("seq"), py::arg("n"), py::arg("data"))
        .def("rewind", [](bound_state & self, llama_seq_id seq, int64_t n) { self.state.rewind(seq, n); }, py::arg("seq"), py::arg("n"))
        .def("clear", [](bound_state & self, llama_seq_id seq) { self.state.clear(seq); }, py::arg("seq"))
        .def("finish", &bound_state::finish);
}
