"""The router of a layer of experts in numpy: scores, the choice among them, and weights, in 32 bits."""

from __future__ import annotations

import numpy as np

F32 = np.float32


def scores_of(logits: np.ndarray, scoring: str) -> np.ndarray:
    """Softmax over the experts, or the logistic function of each logit."""
    if scoring == "sigmoid":
        with np.errstate(over="ignore"):
            return F32(1) / (F32(1) + np.exp(-logits))
    exps = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return exps / exps.sum(axis=1, keepdims=True, dtype=F32)


def masked(choices: np.ndarray, router: dict, biased: bool) -> np.ndarray:
    """Choices in which the experts of groups that are not kept are filled."""
    tokens, experts = choices.shape
    size = experts // router["groups"]
    groups = np.sort(choices.reshape(tokens, router["groups"], size), axis=2)
    of_groups = groups[:, :, -2:].sum(axis=2, dtype=F32) if biased else groups[:, :, -1]
    kept = np.argsort(-of_groups, axis=1, kind="stable")[:, : router["top_groups"]]
    keeps = np.zeros((tokens, router["groups"]), bool)
    np.put_along_axis(keeps, kept, True, axis=1)
    fill = F32(0) if router["fill"] == "zero" else F32(-np.inf)
    return np.where(np.repeat(keeps, size, axis=1), choices, fill)


def route(logits, router: dict, bias=None, token_ids=None, hash_table=None) -> tuple[np.ndarray, np.ndarray]:
    """Experts of each token and their weights, `[N, k]` each."""
    scores = scores_of(logits, router["scoring"])
    if router["choice"] == "hashed":
        ids = hash_table[token_ids].astype(np.int64)
    else:
        biased = router["choice"] == "biased"
        choices = scores + bias if biased else scores
        if router["groups"] > 1:
            choices = masked(choices, router, biased)
        ids = np.argsort(-choices, axis=1, kind="stable")[:, : router["top_k"]]
    weights = np.take_along_axis(scores, ids, axis=1)
    if router["renormalise"] != "raw":
        tiny = F32(1e-20) if router["renormalise"] == "sum_and_tiny" else F32(0)
        weights = weights / (weights.sum(axis=1, keepdims=True, dtype=F32) + tiny)
    return ids.astype(np.int32), (weights * F32(router["scale"])).astype(F32)
