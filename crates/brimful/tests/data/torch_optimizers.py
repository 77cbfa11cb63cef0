"""Trains parameters of several shapes in f64 with torch's Adafactor and Muon, for tests/suite/optim.rs.

    torch_optimizers.py OUT     starts, gradients and results
"""
import sys

import torch
from safetensors.torch import save_file

# Muon computes its iteration in bf16.
torch.Tensor.bfloat16 = torch.Tensor.clone

torch.manual_seed(0)
shapes = dict(wide=(5, 9), tall=(8, 3), square=(4, 4), conv=(3, 2, 3, 2), vector=(7,), transposed=(6, 4))
start = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
gradients = {
    name: [torch.randn(shape, dtype=torch.float64) * 3 ** (step - 3) for step in range(6)] for name, shape in shapes.items()
}
factored, muon = torch.optim.Adafactor, torch.optim.Muon
cases = dict(
    adafactor=(factored, dict()),
    adafactor_large=(factored, dict(lr=1.0, weight_decay=0.1, d=2.0)),
    adafactor_eps=(factored, dict(lr=0.5, beta2_decay=-0.5, eps=(0.1, 0.5))),
    muon=(muon, dict(lr=0.02)),
    muon_plain=(muon, dict(lr=0.02, nesterov=False, momentum=0.8, weight_decay=0.0)),
    muon_rms=(muon, dict(lr=0.02, adjust_lr_fn="match_rms_adamw")),
    muon_steps=(muon, dict(lr=0.02, ns_steps=3, ns_coefficients=(2.0, -1.5, 0.5), eps=0.5)),
)
out = {f"start.{name}": tensor for name, tensor in start.items()}
out |= {f"gradient.{name}.{step}": g for name, all in gradients.items() for step, g in enumerate(all)}
for case, (optimizer, options) in cases.items():
    for name, shape in shapes.items():
        if optimizer is muon and len(shape) != 2:
            continue
        parameter = torch.nn.Parameter(start[name].clone())
        steps = optimizer([parameter], **options)
        for gradient in gradients[name]:
            parameter.grad = gradient.clone()
            steps.step()
        out[f"{case}.{name}"] = parameter.detach()
save_file(out, sys.argv[1])
