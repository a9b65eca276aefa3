// The extension module `_core`: this file only lists what exists.
#include "compat.h"
#include "library/breakdown.h"

#include <pybind11/stl.h>

namespace py = pybind11;

void register_kv_state(py::module_ & m);
void register_host_buffer(py::module_ & m);
void register_nextn(py::module_ & m);
void register_pulse(py::module_ & m);

PYBIND11_MODULE(_core, m) {
    compat::check_library();
    m.attr("LLAMA_VERSION")    = PYCTL_LLAMA_VERSION;
    m.attr("GGML_VERSION")     = PYCTL_GGML_VERSION;
    m.attr("BINDINGS_VERSION") = PYCTL_BINDINGS_VERSION;
    m.def("breakdown", [](uintptr_t ctx) { return breakdown_of(reinterpret_cast<llama_context *>(ctx)); }, py::arg("ctx"));
    m.def("row_places", [](uintptr_t ctx) { return row_places_of(reinterpret_cast<llama_context *>(ctx)); }, py::arg("ctx"));
    m.def("layer_devices", [](uintptr_t model) { return layer_devices_of(reinterpret_cast<llama_model *>(model)); }, py::arg("model"));
    register_host_buffer(m);
    register_kv_state(m);
    register_nextn(m);
    register_pulse(m);
}
