#include "device/copy_progress.h"

#include "device/device_runtime.h"

#include <algorithm>
#include <utility>

copy_progress::copy_progress(std::vector<ggml_backend_t> streams) : streams(std::move(streams)) {
    askable = std::all_of(this->streams.begin(), this->streams.end(), [](ggml_backend_t stream) {
        return device_runtime::can_ask(ggml_backend_get_device(stream));
    });
}

copy_progress::ticket copy_progress::take() {
    ++taken;
    if (streams.empty()) {
        return taken;
    }
    events reached;
    if (spare.empty()) {
        for (ggml_backend_t stream : streams) {
            reached.emplace_back(ggml_backend_event_new(ggml_backend_get_device(stream)));
        }
    } else {
        reached = std::move(spare.back());
        spare.pop_back();
    }
    for (size_t i = 0; i < streams.size(); ++i) {
        ggml_backend_event_record(reached[i].get(), streams[i]);
    }
    marks.push_back({ taken, std::move(reached) });
    return taken;
}

bool copy_progress::is_complete(ticket t) {
    const auto is_reached = [](const event_handle & event) { return device_runtime::is_complete(event.get()); };
    if (streams.empty()) {
        complete = std::max(complete, taken > lag ? taken - lag : 0);
    } else if (askable) {
        // Each stream does one thing after the other.
        while (complete < t && !marks.empty() &&
               std::all_of(marks.front().reached.begin(), marks.front().reached.end(), is_reached)) {
            pop_front();
        }
    }
    return t <= complete;
}

void copy_progress::wait(ticket t) {
    while (complete < t && !marks.empty()) {
        for (const event_handle & event : marks.front().reached) {
            ggml_backend_event_synchronize(event.get());
        }
        pop_front();
    }
    complete = std::max(complete, t);
}

void copy_progress::all_complete() {
    while (!marks.empty()) {
        pop_front();
    }
    complete = taken;
}

void copy_progress::pop_front() {
    complete = marks.front().number;
    spare.push_back(std::move(marks.front().reached));
    marks.pop_front();
}
