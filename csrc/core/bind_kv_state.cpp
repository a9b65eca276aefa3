// Registers KVState: unpacks Python objects, checks buffers, releases the GIL around the copies.
#include "core/kv_state.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <variant>

namespace py = pybind11;

namespace {

// The bytes of `buffer`, which `infos` keeps from now on.
std::pair<uint8_t *, size_t> bytes_of(const py::buffer & buffer, bool writable, std::vector<py::buffer_info> & infos) {
    infos.push_back(buffer.request(writable));
    const py::buffer_info & info = infos.back();
    if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
        throw py::value_error("the buffer is not contiguous");
    }
    return { static_cast<uint8_t *>(info.ptr), static_cast<size_t>(info.view()->len) };
}

// So many calls may be under way before the next one waits for the oldest. A host is ahead of its device by two or three;
// one that cannot see how far the device is keeps the latest snapshot's.
constexpr size_t max_in_flight = 16, max_unseen = 2;

constexpr const char * kind_names[] = { "attention", "hybrid", "opaque" };

// A kv_state and the buffers that its copies have yet to read or fill. They are let go when the copies are complete: at
// the next call, for there may never be one to `finish`.
class bound_state : public kv_state {
public:
    bound_state(uintptr_t ctx, llama_seq_id seq, size_t lag, bool marks, bool defers, const unfit_classes & unfit)
        : kv_state(reinterpret_cast<llama_context *>(ctx), seq, lag, marks, defers, unfit) {}

    ~bound_state() { kv_state::finish(); }

    // Calls `function` of kv_state, which may take its time; finished copies are released.
    template <auto function, typename... A> auto call(A... given) {
        const std::shared_ptr<void> after(nullptr, [this](void *) { let_go(); });
        const py::gil_scoped_release release;
        return (this->*function)(given...);
    }

    // Calls `function` of kv_state, which starts copies to `out`.
    template <auto function, typename... A> void save(A... given, const py::buffer & out) {
        std::vector<py::buffer_info> infos;
        const auto                   bytes = bytes_of(out, true, infos);
        started(std::move(infos), [&] { (this->*function)(given..., bytes.first, bytes.second); });
    }

    // Held rows or a block, and which rows of it.
    using sources = std::vector<std::tuple<std::variant<held_rows::handle, py::buffer>, int64_t, int64_t>>;

    void load(llama_seq_id seq, int64_t p0, const sources & spans, const std::optional<py::buffer> & state, const sources & window) {
        std::vector<py::buffer_info> infos;
        const std::vector<row_span>  parts = spans_of(spans, infos), rows = spans_of(window, infos);
        std::pair<uint8_t *, size_t> bytes{};
        if (state) {
            bytes = bytes_of(*state, false, infos);
        }
        started(std::move(infos), [&] { kv_state::load(seq, p0, parts, bytes.first, bytes.second, rows); });
    }

    size_t in_flight_bytes() {
        let_go();
        size_t sum = 0;
        for (const flight & copies : in_flight) {
            for (const py::buffer_info & info : copies.buffers) {
                sum += static_cast<size_t>(info.view()->len);
            }
        }
        return sum;
    }

private:
    // Releases finished copies.
    void let_go() {
        while (!in_flight.empty() && progress().is_complete(in_flight.front().ticket)) {
            in_flight.pop_front();
        }
    }

    struct flight {
        copy_progress::ticket        ticket;
        std::vector<py::buffer_info> buffers;
    };

    // `infos` gets the buffers that the spans point into.
    static std::vector<row_span> spans_of(const sources & spans, std::vector<py::buffer_info> & infos) {
        std::vector<row_span> parts;
        for (const auto & [from, first, last] : spans) {
            if (const auto * held = std::get_if<held_rows::handle>(&from)) {
                parts.push_back({ nullptr, 0, first, last, *held });
                continue;
            }
            const auto bytes = bytes_of(std::get<py::buffer>(from), false, infos);
            parts.push_back({ bytes.first, bytes.second, first, last });
        }
        return parts;
    }

    // Calls `function`, which starts copies of `infos`, and keeps these until the copies are complete.
    template <typename F> void started(std::vector<py::buffer_info> && infos, const F & function) {
        let_go();
        try {
            const py::gil_scoped_release release;  // the copies touch no Python object; the caller keeps the buffers alive
            function();
        } catch (...) {
            call<&kv_state::finish>();  // some copies may have started
            throw;
        }
        if (!is_async()) {
            return;
        }
        in_flight.push_back({ progress().take(), std::move(infos) });
        if (in_flight.size() > (progress().can_ask() ? max_in_flight : max_unseen)) {
            {
                const py::gil_scoped_release release;
                progress().wait(in_flight.front().ticket);
            }
            in_flight.pop_front();
        }
    }

    std::deque<flight> in_flight;  // in the order of the copies
};

}  // namespace

void register_kv_state(py::module_ & m) {
    py::register_exception<out_of_cells>(m, "OutOfCells", PyExc_RuntimeError);
    py::class_<kv_state>(m, "ContextState");  // as which other modules take a KVState
    py::class_<bound_state, kv_state>(m, "KVState")
        .def(py::init<uintptr_t, llama_seq_id, size_t, bool, bool, const kv_state::unfit_classes &>(), py::arg("ctx"),
             py::arg("seq") = 0, py::arg("lag") = 0, py::arg("marks") = false, py::arg("defers") = false,
             py::arg("unfit") = kv_state::unfit_classes(), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("kind", [](const bound_state & s) { return kind_names[static_cast<int>(s.kind())]; })
        .def_property_readonly("type", &kv_state::type)
        .def_property_readonly("window", &kv_state::window)
        .def_property_readonly("layout", &kv_state::layout_text)
        .def_property_readonly("reason", &kv_state::reason)
        .def_property_readonly("is_async", &kv_state::is_async)
        .def_property_readonly("in_flight_bytes", &bound_state::in_flight_bytes)
        .def("n_tokens", &kv_state::n_tokens, py::arg("seq"))
        .def("position", &kv_state::position, py::arg("seq"), py::arg("n"))
        .def("add_image", [](const bound_state & s, llama_seq_id seq, int64_t columns, int64_t count) {
            s.movable_rows(seq).add_image(seq, columns, count);
        }, py::arg("seq"), py::arg("columns"), py::arg("count"))
        .def("rows_size", [](const bound_state & s, int64_t p0, int64_t p1) { return s.movable_rows().size(p0, p1); },
             py::arg("p0"), py::arg("p1"))
        .def("save_rows", &bound_state::save<&kv_state::save_rows, llama_seq_id, int64_t, int64_t>, py::arg("seq"), py::arg("p0"),
             py::arg("p1"), py::arg("out"))
        .def("state_size", &kv_state::state_size, py::arg("seq"))
        .def("save_state", &bound_state::save<&kv_state::save_state, llama_seq_id, int64_t>, py::arg("seq"), py::arg("n"), py::arg("out"))
        .def("save_window", &bound_state::save<&kv_state::save_window, llama_seq_id, int64_t, int64_t>, py::arg("seq"),
             py::arg("p0"), py::arg("p1"), py::arg("out"))
        .def("load", &bound_state::load, py::arg("seq"), py::arg("p0"), py::arg("spans"), py::arg("state") = py::none(),
             py::arg("window") = bound_state::sources())
        .def("keep_history", &kv_state::keep_history, py::arg("keeps"))
        .def_property_readonly("has_marks", &kv_state::has_marks)
        .def("mark", &bound_state::call<&kv_state::mark, llama_seq_id, int64_t>, py::arg("seq"), py::arg("n"))
        .def("reset", &bound_state::call<&kv_state::reset, llama_seq_id>, py::arg("seq"))
        .def("rewind", &bound_state::call<&kv_state::rewind, llama_seq_id, int64_t>, py::arg("seq"), py::arg("n"))
        .def_property_readonly("can_hold", &kv_state::can_hold)
        .def_property_readonly("n_free", [](const bound_state & s) { return s.movable_rows().n_free(); })
        .def_property_readonly("n_held", [](const bound_state & s) { return s.movable_rows().n_held(); })
        .def("hold", [](const bound_state & s, llama_seq_id seq, int64_t p0, int64_t p1) { return s.movable_rows(seq).hold(seq, p0, p1); },
             py::arg("seq"), py::arg("p0"), py::arg("p1"))
        .def("release", [](const bound_state & s, held_rows::handle held) { s.movable_rows().release(held); }, py::arg("held"))
        .def("fetch", &bound_state::save<&kv_state::fetch, held_rows::handle, int64_t, int64_t>, py::arg("held"), py::arg("p0"),
             py::arg("p1"), py::arg("out"))
        .def("n_own", [](const bound_state & s, held_rows::handle held, int64_t p0, int64_t p1) { return s.movable_rows().n_own(held, p0, p1); },
             py::arg("held"), py::arg("p0"), py::arg("p1"))
        .def("reserve", &kv_state::reserve, py::arg("n"), py::arg("in_parts") = false, py::call_guard<py::gil_scoped_release>())
        .def("cut", &kv_state::cut, py::arg("seq"), py::arg("n"))
        .def("clear", &bound_state::call<&kv_state::clear, llama_seq_id>, py::arg("seq"))
        .def("finish", &bound_state::call<&kv_state::finish>);
}
