//! Transformer block for tests of memory.

use tch::Tensor;
use tch::nn;

/// Builds a causal block with this many heads.
pub fn block(p: &nn::Path, width: i64, heads: i64) -> nn::Func<'static> {
    let norm = |name| nn::layer_norm(p / name, vec![width], Default::default());
    let linear = |name, to| nn::linear(p / name, width, to * width, Default::default());
    let (norms, mix, out, up) =
        ([norm("n1"), norm("n2")], linear("mix", 3), linear("out", 1), linear("up", 4));
    let down = nn::linear(p / "down", 4 * width, width, Default::default());
    nn::func(move |x: &Tensor| {
        let (rows, tokens, width) = x.size3().expect("three dimensions");
        let parts = x.apply(&norms[0]).apply(&mix).view([rows, tokens, 3, heads, width / heads]);
        let parts = parts.permute([2, 0, 3, 1, 4]).unbind(0);
        let [q, k, v] = [&parts[0], &parts[1], &parts[2]];
        let mixed =
            Tensor::scaled_dot_product_attention(q, k, v, None::<Tensor>, 0.0, true, None, false);
        let x = x + mixed.transpose(1, 2).reshape([rows, tokens, width]).apply(&out);
        &x + x.apply(&norms[1]).apply(&up).gelu("none").apply(&down)
    })
}
