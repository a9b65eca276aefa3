"""The faults that `tools.faults` plants, one at a time, and the tests that have to catch each."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FAULTS", "Fault"]


class Fault(NamedTuple):
    """``old``, which occurs once in the file ``place``, becomes ``new``; one of ``tests`` has to fail."""

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "wrong-cell",  # rows that follow each other are taken for rows whose cells also do
        "csrc/device/held_rows.cpp",
        "runs.back().cell + runs.back().count == run.cell && runs.back().row",
        "runs.back().row",
        ("tests/model/native/test_kv_state.py::test_sequences_of_a_unified_cache_move_rows_independently",),
    ),
    Fault(
        "late-state",
        "csrc/core/sequence_state.cpp",
        "static_cast<llama_pos>(n - 1);",
        "static_cast<llama_pos>(n);",
        ("tests/model/native/test_kv_state.py::test_a_prefix_is_its_rows_and_its_state",),
    ),
    Fault(
        "short-window",  # the oldest row that the next token sees is missing
        "csrc/core/sequence_state.cpp",
        "library::sees(ctx, n, first - 1)",
        "library::sees(ctx, n + 1, first - 1)",
        ("tests/model/native/test_kv_state.py::test_a_window_is_saved_and_loaded_in_parts",),
    ),
    Fault(
        "other-mark",  # sequences go back to the mark of the first one
        "csrc/core/sequence_state.cpp",
        "{ &kept[i].bytes, static_cast<size_t>(seq) * piece.total(), piece.size,",
        "{ &kept[i].bytes, 0 * static_cast<size_t>(seq), piece.size,",
        ("tests/model/native/test_marks.py::test_each_sequence_has_its_own_mark",),
    ),
    Fault(
        "lost-lock",
        "pyctl/cache/ram.py",
        "return snapshot not in self.pinned and snapshot not in self.locks",
        "return snapshot not in self.pinned",
        ("tests/unit/cache/test_ram.py::test_locked_and_pinned_snapshots_stay",),
    ),
    Fault(
        "lost-end-lock",
        "pyctl/cache/ram.py",
        "            if end not in self._cache.locks:\n                self.drop(end)",
        "            self.drop(end)",
        ("tests/unit/cache/test_ram.py::test_a_locked_end_of_a_prompt_stays",),
    ),
    Fault(
        "nameless-rows",  # other rows of the same tokens have the same name
        "pyctl/cache/disk/chain.py",
        'struct.pack("<QI", segment.rows.nbytes, crc)',
        'struct.pack("<QI", segment.rows.nbytes, 0 * crc)',
        ("tests/unit/cache/disk/test_store.py::test_equal_tokens_with_other_rows_are_kept_apart",),
    ),
    Fault(
        "gone-entry",  # the index lists files that the disk lost
        "pyctl/cache/disk/directory.py",
        "known.pop(record.name, None)",
        "known[record.name] = record.exact",
        ("tests/unit/cache/disk/test_store.py::test_use_and_pins_decide_who_goes",),
    ),
    Fault(
        "any-model-pinned",
        "pyctl/cache/disk/index.py",
        '"UPDATE files SET pinned = ? WHERE fingerprint = ? AND file = ?"',
        '"UPDATE files SET pinned = ? WHERE ? != 0 AND file = ?"',
        ("tests/unit/server/api/test_prefix_cache.py::test_a_pin_counts_for_the_model_it_was_set_for",),
    ),
    Fault(
        "foreign-file",  # a file that belongs to another model
        "pyctl/cache/disk/segment_files.py",
        "if header.fingerprint != path.parent.name:",
        "if not header.fingerprint:",
        ("tests/unit/cache/disk/test_damage.py::test_files_of_another_model_under_our_name",),
    ),
    Fault(
        "stale-fingerprint",  # an adapter that was trained further
        "pyctl/llama/fingerprint.py",
        "Path(adapter).expanduser().read_bytes()",
        "str(Path(adapter).expanduser()).encode()",
        ("tests/model/llama/test_loader.py::test_adapters_change_the_model_and_its_fingerprint",),
    ),
    Fault(
        "other-model",  # a model that was loaded again restores the snapshots of another file
        "pyctl/llama/llama_backend.py",
        "if memory.identity and identity != memory.identity:",
        "if memory.identity and not identity:",
        ("tests/model/test_reload.py::test_a_model_whose_file_was_replaced_is_loaded_from_the_new_one",),
    ),
    Fault(
        "given-away",  # a sequence is parked between two batches of its prompt
        "pyctl/engine/schedule/admission.py",
        "if active.seq is not None and active.stats is not None}",
        "if active.seq is not None and active.pending is not None}",
        ("tests/unit/engine/test_scheduler.py::test_a_prompt_keeps_its_cells_between_its_batches",),
    ),
    Fault(
        "other-tie",  # of two equal logits the last one wins
        "pyctl/llama/sampler.py",
        "int(self._outputs.row(index).argmax())",
        "int(self._n_vocab - 1 - self._outputs.row(index)[::-1].argmax())",
        ("tests/model/llama/test_sampler.py::test_the_same_tokens_are_chosen_of_the_outputs_of_a_long_draft",),
    ),
    Fault(
        "narrow-top-k",  # penalties may lower some of the k
        "pyctl/llama/sampler.py",
        "return s.top_k + penalised",
        "return s.top_k",
        ("tests/model/llama/test_sampler.py::test_the_same_tokens_are_chosen",),
    ),
    Fault(
        "free-draft",  # the first draft stays, whatever was sampled
        "pyctl/engine/decode.py",
        "            if n_right == len(drafts) or token != drafts[n_right]:\n",
        "            if n_right == len(drafts) or (token != drafts[n_right] and n_right):\n",
        ("tests/unit/engine/draft/test_verify_batch.py::test_rejected_long_drafts_are_evaluated_again_once",),
    ),
    Fault(
        "leaking-cancel",  # rows restored before a cancel keep their cells
        "pyctl/cache/restore.py",
        "    except GeneratorExit:  # cancelled while the disk was read\n        memory.clear(live.id)\n",
        "    except GeneratorExit:\n",
        (
            "tests/unit/engine/test_slow_disk.py::test_a_request_that_is_cancelled_while_it_waits_leaves_an_empty_sequence",
        ),
    ),
    Fault(
        "leaking-suspension",  # a request that is cancelled while suspended keeps its RAM
        "pyctl/engine/schedule/scheduler.py",
        "            self._prefix_cache.cache.release(active.kept)\n            active.kept = None\n",
        "            active.kept = None\n",
        ("tests/unit/engine/test_scheduler.py::test_a_suspended_reply_that_is_cancelled_frees_everything",),
    ),
    Fault(
        "unseen-header",  # a prompt that ends with the assistant's header does not end with one
        "pyctl/chat/boundaries.py",
        "at + len(start) <= tokens.size]",
        "at + len(start) < tokens.size]",
        ("tests/unit/chat/test_boundaries.py::test_a_header_counts_when_all_its_tokens_are_there",),
    ),
)
