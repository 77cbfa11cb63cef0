//! A ResNet's first convolution: 7×7 with a stride of 2, over the few channels of an image.
//!
//! Tensor cores take channels in multiples of four (f32) or sixteen (half precision), so with three channels many
//! of their products are zeros. A convolution with a stride of 2 equals one with a stride of 1 over 2×2 squares,
//! with the pixels of a square as channels; there its kernel is 4×4:
//!
//! ```text
//!   out[h] = Σ w[k] · x[2h + k − 3]                k = 0…6
//!          = Σ v[2j + a] · X[h + j − 2][a]         j = 0…3, a = 0, 1
//!   with X[h][a] = x[2h + a] and v = 0, w[0], …, w[6]
//! ```
//!
//! Columns follow the same formula.

use brimful::device::allows_tf32;
use tch::nn::{self, Module, Path};
use tch::{Kind, Tensor};

use crate::conv::conv;

/// Side of the kernel, side of the kernel over squares, and number of squares that the kernel reads before the
/// image.
const KERNEL: i64 = 7;
const FOLDED: i64 = 4;
const BEFORE: i64 = 2;

/// The convolution, computed over squares if that is faster.
#[derive(Debug)]
pub(crate) struct StemConv(nn::Conv2D);

impl StemConv {
    pub(crate) fn new(path: &Path, from: i64, to: i64) -> Self {
        Self(conv(path, from, to, KERNEL, 2))
    }
}

impl Module for StemConv {
    fn forward(&self, x: &Tensor) -> Tensor {
        match x.device().is_cuda() && is_faster_folded(x) {
            true => folded_conv(x, &self.0.ws, channels_of_cores(x.kind())),
            false => self.0.forward(x),
        }
    }
}

/// Returns whether the convolution is faster over squares, because tensor cores would otherwise multiply zeros.
/// Inputs that require a gradient are excluded, because the gradient would have to pass back through the squares.
fn is_faster_folded(x: &Tensor) -> bool {
    let is_even = matches!(x.size()[..], [_, 1..=4, h, w] if h % 2 == 0 && w % 2 == 0);
    let channels_last = is_even && x.stride()[1] == 1;
    let by_cores = match x.kind() {
        Kind::BFloat16 | Kind::Half => true,
        Kind::Float => allows_tf32().unwrap_or(false),
        _ => false,
    };
    by_cores && channels_last && !x.requires_grad()
}

/// Returns the number that must divide the channels for tensor cores: 32 bytes in half precision, 16 bytes in f32.
fn channels_of_cores(kind: Kind) -> i64 {
    if kind == Kind::Float { 4 } else { 16 }
}

/// Computes the convolution over squares, with zero channels up to a multiple of `step`.
fn folded_conv(x: &Tensor, weight: &Tensor, step: i64) -> Tensor {
    let channels = (4 * x.size()[1] + step - 1) / step * step;
    let squares = squares(x, channels);
    squares.conv2d(&folded_weight(weight, channels), None::<Tensor>, [1], [0], [1], 1)
}

/// Rearranges an image into 2×2 squares, with zeros around it that the kernel reads beyond the image.
fn squares(x: &Tensor, channels: i64) -> Tensor {
    let (n, c, h, w) = x.size4().expect("an image has four dimensions");
    let (h, w, around) = (h / 2, w / 2, FOLDED - 1);
    let all = Tensor::zeros([n, h + around, w + around, channels], (x.kind(), x.device()));
    let inside = all.narrow(1, BEFORE, h).narrow(2, BEFORE, w).narrow(3, 0, 4 * c);
    let pixels = x.permute([0, 2, 3, 1]).view([n, h, 2, w, 2, c]).permute([0, 1, 3, 2, 4, 5]);
    inside.view([n, h, w, 2, 2, c]).copy_(&pixels);
    all.permute([0, 3, 1, 2])
}

/// Rearranges the weights for squares: a row and a column of zeros before them, then pairs.
fn folded_weight(weight: &Tensor, channels: i64) -> Tensor {
    let (to, from, ..) = weight.size4().expect("a convolution's weight has four dimensions");
    let even = weight.constant_pad_nd([1, 0, 1, 0]);
    let twos = even.view([to, from, FOLDED, 2, FOLDED, 2]).permute([0, 3, 5, 1, 2, 4]);
    let folded = twos.reshape([to, 4 * from, FOLDED, FOLDED]);
    match channels - 4 * from {
        0 => folded,
        more => folded.constant_pad_nd([0, 0, 0, 0, 0, more]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// Computes the convolution directly and over squares, each with the weight's gradient.
    fn both_ways(x: &Tensor, weight: &Tensor, step: i64) -> [(Tensor, Tensor); 2] {
        let plain = |w: &Tensor| x.conv2d(w, None::<Tensor>, [2], [KERNEL / 2], [1], 1);
        let folded = |w: &Tensor| folded_conv(x, w, step);
        let back = |f: &dyn Fn(&Tensor) -> Tensor| {
            let leaf = weight.detach().copy().set_requires_grad(true);
            let out = f(&leaf);
            // Each position has a weight of its own.
            let counts = Tensor::arange(out.numel() as i64, (Kind::Double, Device::Cpu)).sin();
            (&out * counts.view_as(&out)).sum(Kind::Double).backward();
            (out.detach(), leaf.grad())
        };
        [back(&plain), back(&folded)]
    }

    #[test]
    fn over_squares_it_is_the_same_convolution() {
        let double = (Kind::Double, Device::Cpu);
        for (channels, height, width, step) in
            [(3, 14, 10, 16), (3, 2, 2, 4), (1, 8, 32, 16), (4, 10, 6, 16)]
        {
            let x = Tensor::randn([2, channels, height, width], double);
            let weight = Tensor::randn([5, channels, KERNEL, KERNEL], double);
            for x in [x.shallow_clone(), x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])]
            {
                let [(plain, by_weight), (folded, by_folded)] = both_ways(&x, &weight, step);
                assert_eq!(plain.size(), folded.size());
                assert!(plain.allclose(&folded, 1e-10, 1e-12, false), "{height} × {width}");
                assert!(by_weight.allclose(&by_folded, 1e-10, 1e-12, false), "{height} × {width}");
            }
        }
    }

    #[test]
    fn images_that_tensor_cores_would_pad_are_taken_by_squares() {
        let image = |channels, height, kind| {
            let x = Tensor::randn([1, height, 8, channels], (Kind::Float, Device::Cpu));
            x.to_kind(kind).permute([0, 3, 1, 2])
        };
        assert!(is_faster_folded(&image(3, 8, Kind::BFloat16)));
        assert!(!is_faster_folded(&image(3, 8, Kind::BFloat16).set_requires_grad(true)));
        assert!(!is_faster_folded(&image(3, 8, Kind::BFloat16).contiguous()), "channels first");
        assert!(!is_faster_folded(&image(5, 8, Kind::BFloat16)), "five channels");
        assert!(!is_faster_folded(&image(3, 7, Kind::BFloat16)), "an odd side");
        assert!(!is_faster_folded(&image(3, 8, Kind::Double)));
    }

    #[test]
    fn on_a_gpu_halves_come_to_the_same() {
        if !tch::Cuda::is_available() {
            return;
        }
        let device = Device::Cuda(0);
        let x = Tensor::randn([4, 3, 32, 24], (Kind::BFloat16, device));
        let x = x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
        let mut store = nn::VarStore::new(device);
        let stem = StemConv::new(&store.root(), 3, 64);
        let plain = {
            let wide = stem.0.forward(&x.to_kind(Kind::Float));
            wide.square().sum(Kind::Float).backward();
            (wide.detach(), stem.0.ws.grad())
        };
        store.set_kind(Kind::BFloat16);
        stem.0.ws.shallow_clone().zero_grad();
        let folded = stem.forward(&x);
        assert!(is_faster_folded(&x));
        folded.to_kind(Kind::Float).square().sum(Kind::Float).backward();
        for (ours, exact) in [(folded.detach(), plain.0), (stem.0.ws.grad(), plain.1)] {
            let off = (ours.to_kind(Kind::Float) - &exact).norm() / exact.norm();
            assert!(off.double_value(&[]) < 2e-2);
        }
    }
}
