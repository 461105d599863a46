"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from trainapp.torch_private import sharded_muon_updates


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for the weights of hidden layers, one moment each; torch.optim.AdamW for embeddings, the head
    and all non-matrices.

    Muon (kellerjordan.github.io/posts/muon) makes each update of a matrix nearly orthogonal, in bf16.
    adjust_lr_fn: "match_rms_adamw" (arXiv:2502.16982) lets both share a learning rate; "original" is Keller Jordan's.
    Raises ValueError if there is no hidden matrix.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        of_muon: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        of_muon["adjust_lr_fn"] = adjust_lr_fn
        of_adamw: dict[str, Any] = {"betas": tuple(betas), "eps": eps, "fused": fused}
        matrices = [group for group in self.param_groups if group.pop("is_matrix", False)]
        others = [group for group in self.param_groups if not any(group is matrix for matrix in matrices)]
        if not matrices:
            raise ValueError("optimizer=muon: the model has no hidden matrix; use optimizer=adamw")
        self._parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr, **of_muon)]
        if others:
            self._parts.append(torch.optim.AdamW(others, lr, **of_adamw))
        for part in self._parts:  # the groups are the same dictionaries in both; so is the state
            part.state = self.state

    @staticmethod
    def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """A model's parameter groups: hidden matrices; other weights; norms and biases, without weight decay."""
        outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head = getattr(model, "head", None)
        outside |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in outside]
        others = [p for p in trained if p.ndim > 2 or (p.ndim == 2 and id(p) in outside)]
        groups = [
            {"params": matrices, "weight_decay": weight_decay, "is_matrix": True},
            {"params": others, "weight_decay": weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update by both."""
        with sharded_muon_updates():
            for part in self._parts:
                part.step()
