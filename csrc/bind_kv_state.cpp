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

size_t n_bytes(const py::buffer_info & info) {
    return static_cast<size_t>(info.size) * static_cast<size_t>(info.itemsize);
}

}  // namespace

void register_kv_state(py::module_ & m) {
    py::class_<kv_state>(m, "KVState")
        .def(py::init([](uintptr_t ctx, llama_seq_id seq) {
                 return new kv_state(reinterpret_cast<llama_context *>(ctx), seq);
             }),
             py::arg("ctx"), py::arg("seq") = 0)
        .def_property_readonly("kind",
                               [](const kv_state & self) {
                                   switch (self.kind()) {
                                       case memory_kind::attention: return "attention";
                                       case memory_kind::hybrid:    return "hybrid";
                                       default:                     return "whole";
                                   }
                               })
        .def_property_readonly("layout", &kv_state::describe)
        .def_property_readonly("layout_hash", &kv_state::layout)
        .def_property_readonly("row_bytes", &kv_state::row_bytes)
        .def_property_readonly("n_layers", &kv_state::n_layers)
        .def_property_readonly("transposed", &kv_state::transposed)
        .def("n_rows", &kv_state::n_rows, py::arg("seq"))
        .def("ordered", &kv_state::ordered, py::arg("seq"))
        .def("rows_size", &kv_state::rows_size, py::arg("p0"), py::arg("p1"))
        .def("save_rows",
             [](const kv_state & self, llama_seq_id seq, int64_t p0, int64_t p1, const py::buffer & out) {
                 const py::buffer_info info = bytes_of(out, true);
                 // The copies touch no Python object; `info` keeps the buffer alive.
                 const py::gil_scoped_release release;
                 self.save_rows(seq, p0, p1, static_cast<uint8_t *>(info.ptr), n_bytes(info));
             },
             py::arg("seq"), py::arg("p0"), py::arg("p1"), py::arg("out"))
        .def("load_rows",
             [](kv_state & self, llama_seq_id seq, int64_t p0, const std::vector<std::tuple<py::buffer, int64_t, int64_t>> & spans) {
                 std::vector<py::buffer_info> infos;
                 std::vector<row_span>        parts;
                 infos.reserve(spans.size());
                 for (const auto & [buffer, first, last] : spans) {
                     infos.push_back(bytes_of(buffer, false));
                     parts.push_back({ static_cast<const uint8_t *>(infos.back().ptr), n_bytes(infos.back()), first, last });
                 }
                 const py::gil_scoped_release release;
                 self.load_rows(seq, p0, parts);
             },
             py::arg("seq"), py::arg("p0"), py::arg("spans"))
        .def("state_size", &kv_state::state_size, py::arg("seq"))
        .def("save_state",
             [](const kv_state & self, llama_seq_id seq, int64_t n, const py::buffer & out) {
                 const py::buffer_info        info = bytes_of(out, true);
                 const py::gil_scoped_release release;
                 self.save_state(seq, n, static_cast<uint8_t *>(info.ptr), n_bytes(info));
             },
             py::arg("seq"), py::arg("n"), py::arg("out"))
        .def("load_state",
             [](kv_state & self, llama_seq_id seq, int64_t n, const py::buffer & data) {
                 const py::buffer_info        info = bytes_of(data, false);
                 const py::gil_scoped_release release;
                 self.load_state(seq, n, static_cast<const uint8_t *>(info.ptr), n_bytes(info));
             },
             py::arg("seq"), py::arg("n"), py::arg("data"))
        .def("rewind", &kv_state::rewind, py::arg("seq"), py::arg("n"))
        .def("clear", &kv_state::clear, py::arg("seq"));
}
