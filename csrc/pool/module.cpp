// The extension module `_pool`, RowStore: rows of a KVState that are not in its context.
#include "core/kv_state.h"
#include "module.h"
#include "pool/row_store.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

row_store * move_rows(kv_state & kv, int64_t n_ctx, const std::vector<size_t> & resident, size_t n_stages) {
    row_store * store = nullptr;
    kv.move_rows([&](llama_context * ctx, const memory_parts & parts, const memory_layout & layout, transfer & copies) {
        auto made = std::make_unique<row_store>(ctx, parts.sets[0].cache, layout.rows, layout.hash, copies,
                                                store_settings{ n_ctx, resident, n_stages });
        store     = made.get();
        return made;
    });
    return store;
}

}  // namespace

PYBIND11_MODULE(_pool, m) {
    check_module(PYCTL_BUILD);
    py::class_<row_store, std::unique_ptr<row_store, py::nodelete>>(m, "RowStore")  // the KVState has it
        .def(py::init(&move_rows), py::arg("kv"), py::arg("n_ctx"), py::arg("resident"), py::arg("stages") = 2,
             py::keep_alive<1, 2>())
        .def("decode", [](row_store & store, uintptr_t batch) { return store.decode(*reinterpret_cast<llama_batch *>(batch)); },
             py::arg("batch"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("streamed_bytes", &row_store::streamed_bytes)
        .def_property_readonly("wait_ms", &row_store::waited_ms);
}
