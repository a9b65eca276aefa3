"""The right replies, from a second server with one sequence, no cache, and one request at a
time.
"""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import httpx

N_SHOWN = 100
"""Likeliest tokens that are told, constraint or not, as many as allowed: a schema may allow none of
the first.
"""

TIE = 0.1
"""Difference of two log probabilities below which rounding may choose either token, on a CPU."""


class Judge:
    """Replies of the other server, each computed once; ``tie`` is a difference of
    log-probabilities.

    ``is_exact``: it evaluates as the server under test does with --exact, so that no tie excuses a
    difference then.
    """

    def __init__(self, url: str, tie: float = TIE, *, is_exact: bool = False) -> None:
        self.tie = tie
        self.is_exact = is_exact
        self._client = httpx.Client(base_url=url, timeout=600)
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the first choice of /v1/chat/completions for ``body``, with the likeliest tokens.
        Raises RuntimeError.
        """
        asked = {
            **body,
            "stream": False,
            "n": 1,
            "cache_prompt": False,
            "logprobs": True,
            "top_logprobs": N_SHOWN,
        }
        key = json.dumps(asked, sort_keys=True)
        with self._lock:
            if key not in self._known:
                if len(self._known) > 5000:
                    self._known.clear()
                response = self._client.post("/v1/chat/completions", json=asked)
                if response.status_code != 200:
                    raise RuntimeError(
                        f"the judge answers {response.status_code}: {response.text[:300]}"
                    )
                self._known[key] = response.json()["choices"][0]
            return self._known[key]

    def gap(self, body: dict[str, Any], text: str, *, whole: bool) -> float:
        """Return the logarithm by which the right reply's token was likelier than the token with
        which ``text`` leaves it.

        With reasoning or calls, when ``text`` is not the ``whole`` reply, the least of all tokens
        and others.
        """
        choice = self.choice(body)
        tokens = choice["logprobs"]["content"]
        if not whole or choice["message"].get("reasoning_content"):
            return min(map(_gap, tokens))
        said = ""
        for token in tokens:
            if not text.startswith(said + token["token"]):
                return _gap(token, text[len(said) :])
            said += token["token"]
        return _gap(self._end(body, len(tokens)), text[len(said) :])

    def _end(self, body: dict[str, Any], n: int) -> dict[str, Any]:
        """Return the end token after ``n`` others, which the list of a reply lacks, with the
        likeliest ones.
        """
        longer = self.choice({**body, "max_tokens": n + 1, "ignore_eos": True})
        others = longer["logprobs"]["content"][n]["top_logprobs"]
        return {
            **next((other for other in others if not other["token"]), others[0]),
            "top_logprobs": others,
        }

    def close(self) -> None:
        self._client.close()


def _gap(token: dict[str, Any], rest: str = "") -> float:
    """Return the least difference to another token with which ``rest`` starts, which may be the end
    of a reply.
    """
    others = [other for other in token["top_logprobs"] if other["token"] != token["token"]]
    if rest:
        others = [other for other in others if other["token"] and rest.startswith(other["token"])]
    return min((abs(token["logprob"] - other["logprob"]) for other in others), default=math.inf)
