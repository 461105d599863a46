"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from trainapp.torch_private import sharded_muon_updates


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for the weights of hidden layers, one moment each; torch.optim.AdamW for embeddings, the head
    and all non-matrices.

    Muon (kellerjordan.github.io/posts/muon) makes each update of a matrix nearly orthogonal, in bf16. Raises ValueError
    if there is no hidden matrix.

    Args:
        params: groups made by `parameter_groups`.
        adjust_lr_fn: "match_rms_adamw" (arXiv:2502.16982) lets both share a learning rate; "original" is Keller
            Jordan's.
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

        # Divide the groups between the two optimizers.
        matrix_groups = []
        other_groups = []
        for group in self.param_groups:
            is_matrix = group.pop("is_matrix", False)
            if is_matrix:
                matrix_groups.append(group)
            else:
                other_groups.append(group)
        if not matrix_groups:
            raise ValueError("optimizer=muon: the model has no hidden matrix; use optimizer=adamw")

        muon = torch.optim.Muon(
            matrix_groups, lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
        )
        self._optimizers: list[torch.optim.Optimizer] = [muon]
        if other_groups:
            beta1, beta2 = betas  # from a YAML file, a list
            adamw = torch.optim.AdamW(other_groups, lr, betas=(beta1, beta2), eps=eps, fused=fused)
            self._optimizers.append(adamw)

        # One state for all, as they already share the dictionaries of the groups with this optimizer.
        for optimizer in self._optimizers:
            optimizer.state = self.state

    @staticmethod
    def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Return a model's parameter groups: hidden matrices; other weights; norms and biases, without weight decay."""
        not_hidden = _weights_of_embeddings_and_head(model)
        matrices = []
        other_weights = []
        norms_and_biases = []
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2:
                norms_and_biases.append(parameter)
            elif parameter.ndim == 2 and id(parameter) not in not_hidden:
                matrices.append(parameter)
            else:
                other_weights.append(parameter)

        groups = [
            {"params": matrices, "weight_decay": weight_decay, "is_matrix": True},
            {"params": other_weights, "weight_decay": weight_decay},
            {"params": norms_and_biases, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both optimizers."""
        with sharded_muon_updates():
            for optimizer in self._optimizers:
                optimizer.step()


def _weights_of_embeddings_and_head(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are matrices, but no weights of hidden layers."""
    ids = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "head", None)
    if isinstance(head, nn.Module):
        ids.update(id(parameter) for parameter in head.parameters())
    return ids
