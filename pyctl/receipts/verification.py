"""The evaluation of a receipt's prompt and reply again, from nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pyctl.cache.plan import batch_ends
from pyctl.engine.backend import Evaluator, SequenceTokens
from pyctl.receipts.receipt import Receipt

__all__ = ["find_difference"]

SEQ = 0
"""The sequence in use. All others stay empty, as on an idle server."""


def find_difference(receipt: Receipt, evaluator: Evaluator) -> int | None:
    """Return the index of the first token of the reply whose logits differ from the recorded ones
    in any bit; None if all are equal.

    Sequences of ``evaluator`` must be empty, and are afterwards. Raises EngineError if the
    evaluation fails.
    """
    recorded = receipt.digests
    try:
        for index, digest in enumerate(_evaluate(receipt, evaluator)):
            if digest != recorded[index]:
                return index
    finally:
        evaluator.memory.clear(SEQ)
    return None


def _evaluate(receipt: Receipt, evaluator: Evaluator) -> Iterator[int]:
    """Yield the digest of the logits at each token of the reply, as a cold run has them.

    The reply's tokens are given, not sampled: equal logits and an equal seed sample equal tokens.
    """
    facts = evaluator.facts
    prompt = receipt.prompt
    ends = batch_ends(prompt, facts.n_ubatch, batch_cost=facts.batch_cost)
    ends = evaluator.memory.shape.resume_points.add_to(ends)
    n = len(prompt)
    for start, end in itertools.pairwise((0, *ends)):
        evaluator.evaluate(SEQ, prompt.tokens[start:end], start, output=end == n)
    yield evaluator.logits_digest(0)
    for token in receipt.reply[:-1].tolist():
        # Verify batches have one width with --exact. Without drafts all of it is padding.
        width = min(receipt.reply_record.draft_width, facts.n_ctx - n - 1)
        evaluator.decode([SequenceTokens(SEQ, (token,) * (1 + width), n)])
        n += 1
        yield evaluator.logits_digest(0)
        if width:
            evaluator.memory.rollback(SEQ, n)
