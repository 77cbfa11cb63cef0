//! State of one parameter in an optimizer.

use brimful_torch::host::prefer_large_pages;
use brimful_torch::optim::{self as fused, GROUP, fits};
use tch::{Device, Kind, Tensor};

use super::format::{is_eight_bit, scales_of};
use super::method::{Extent, Slot};
use super::{Method, StateFormat};
use crate::Result;

/// Step counter, moments and master of one parameter.
#[derive(Debug)]
pub(super) struct ParameterState {
    /// Remainder of a bf16 parameter: the 16 bits by which its f32 master differs from it. For an f16 parameter,
    /// the f32 master itself.
    ///
    /// If an element of a bf16 parameter is set by hand, its remainder stays: the new master still rounds to the
    /// value that was set.
    pub(super) master: Option<Tensor>,
    /// Version of the parameter when it was last rounded from an f32 `master`.
    pub(super) version: i64,
    /// Whether no step has used the state yet.
    pub(super) is_new: bool,
    /// Number of steps taken: one f32, on the parameter's device.
    pub(super) step: Option<Tensor>,
    /// Tensors of [`Method::moments`].
    pub(super) moments: Vec<Moment>,
}

/// Elements of a moment, and the scales of 8-bit elements.
#[derive(Debug)]
pub(super) struct Moment {
    pub(super) elements: Tensor,
    pub(super) scales: Option<Tensor>,
}

/// Version that no parameter has: a master with this version is compared with the parameter before the next
/// update.
pub(super) const UNKNOWN_VERSION: i64 = -1;

impl Moment {
    /// Creates moment number `at` of a parameter, with the values of `old`.
    fn new(tensor: &Tensor, method: &Method, at: usize, old: Option<&Self>) -> Result<Self> {
        let kind = method.format().kind(tensor.kind(), at);
        let mut elements = match method.moments(tensor.dim())[at].1.shape(&tensor.size()) {
            Some(shape) => Tensor::f_empty(shape, (kind, tensor.device()))?,
            None => empty_beside(tensor, kind, method.updates_in_place(tensor))?,
        };
        let scales = is_eight_bit(kind).then(|| {
            let scales = scales_of(tensor.numel()) as i64;
            Tensor::f_zeros([scales], (Kind::Float, tensor.device()))
        });
        let scales = scales.transpose()?;
        match (old.map(Self::unpacked).transpose()?, &scales) {
            (None, _) => drop(elements.f_zero_()?),
            (Some(old), None) => elements.f_copy_(&old)?,
            (Some(old), Some(scales)) => {
                let mut values = elements.f_empty_like()?.f_to_kind(Kind::Float)?;
                values.f_copy_(&old)?;
                fused::pack_moment(&values, &elements, scales)?;
            }
        }
        Ok(Self { elements, scales })
    }

    fn unpacked(&self) -> Result<Tensor> {
        match &self.scales {
            Some(scales) => Ok(fused::unpack_moment(&self.elements, scales)?),
            None => Ok(self.elements.shallow_clone()),
        }
    }

    /// Returns the moment's tensors.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.elements].into_iter().chain(&self.scales)
    }

    /// Borrows the moment for an update.
    pub(super) fn lend(&self) -> fused::Moment<'_> {
        fused::Moment { elements: &self.elements, scales: self.scales.as_ref() }
    }
}

impl ParameterState {
    /// Creates a state for this parameter as it is now, with the values of `old`. The parameter may have changed
    /// its dtype, device or strides since `old` was made.
    pub(super) fn new(tensor: &Tensor, method: &Method, old: Option<&Self>) -> Result<Self> {
        let step = match old.and_then(|old| old.step.as_ref()) {
            Some(step) => Some(step.f_to_device(tensor.device())?),
            None if method.counts() => {
                Some(Tensor::f_zeros([0_i64; 0], (Kind::Float, tensor.device()))?)
            }
            None => None,
        };
        let moments = (0..method.moments(tensor.dim()).len())
            .map(|at| Moment::new(tensor, method, at, old.map(|old| &old.moments[at])))
            .collect::<Result<_>>()?;
        let in_place = method.updates_in_place(tensor);
        let master = new_master(tensor, in_place, old.and_then(|old| old.master.as_ref()))?;
        let is_new = old.is_none_or(|old| old.is_new);
        Ok(Self { master, version: version(tensor), is_new, step, moments })
    }

    /// Returns whether the parameter can be updated with this state as it is.
    pub(super) fn is_current(&self, tensor: &Tensor, method: &Method) -> bool {
        self.suits(tensor, method) && !self.is_stale(tensor)
    }

    /// Returns whether the parameter was set since it was rounded from its f32 master.
    pub(super) fn is_stale(&self, tensor: &Tensor) -> bool {
        let has_copy = self.master.as_ref().is_some_and(|master| master.kind() == Kind::Float);
        has_copy && self.version != version(tensor)
    }

    /// Returns whether the state fits the method, and the parameter's dtype, device and strides.
    pub(super) fn suits(&self, tensor: &Tensor, method: &Method) -> bool {
        let dense = method.updates_in_place(tensor);
        // If a contiguous copy of the parameter is updated, its state is contiguous too.
        let is_beside = |other: &Tensor, kind: Kind, shape: Option<Vec<i64>>| {
            let there = match shape {
                None if dense => fits(tensor, other),
                shape => {
                    let size = shape.unwrap_or_else(|| tensor.size());
                    other.is_contiguous()
                        && (other.device(), other.size()) == (tensor.device(), size)
                }
            };
            there && other.kind() == kind
        };
        let slots = method.moments(tensor.dim());
        let shapes = slots.iter().map(|(_, extent)| extent.shape(&tensor.size()));
        let master = master_kind(tensor.kind());
        let format = method.format();
        self.step.is_some() == method.counts()
            && self.moments.len() == slots.len()
            && self.master.is_some() == master.is_some()
            && self.master.iter().zip(master).all(|(master, kind)| is_beside(master, kind, None))
            && self.moments.iter().zip(shapes).enumerate().all(|(at, (moment, shape))| {
                is_beside(&moment.elements, format.kind(tensor.kind(), at), shape)
            })
    }

    /// Copies to the master those elements of the parameter that were set since its last update. All other
    /// elements of the master keep their f32 digits. Allocates nothing beyond the [scratch space](refresh_scratch)
    /// made for it.
    pub(super) fn refresh(&self, tensor: &Tensor, scratch: &[Tensor]) -> Result<()> {
        let Some(master) = &self.master else { return Ok(()) };
        for (master, tensor) in pieces(master)?.iter().zip(pieces(&tensor.f_detach()?)?) {
            let empty = |kind| scratch_like(scratch, kind, &tensor);
            let (mut rounded, mut present) = (empty(tensor.kind())?, empty(Kind::Float)?);
            let unchanged = empty(Kind::Bool)?;
            rounded.f_copy_(master)?;
            present.f_copy_(&tensor)?;
            let _ = rounded.f_eq_tensor_out(&unchanged, &tensor)?;
            let _ = master.f_where_self_out(master, &unchanged, &present)?;
        }
        Ok(())
    }

    /// Returns all of the state's tensors.
    pub(super) fn all_tensors(&self) -> impl Iterator<Item = &Tensor> {
        let moments = self.moments.iter().flat_map(Moment::tensors);
        self.step.iter().chain(&self.master).chain(moments)
    }

    /// Returns the state's tensors with their names.
    pub(super) fn tensors(
        &self,
        slots: &'static [Slot],
    ) -> impl Iterator<Item = (String, &Tensor)> {
        let step = self.step.iter().map(|step| ("step".to_owned(), step));
        let master = self.master.iter().map(|master| match master.kind() {
            Kind::Int16 => (REMAINDER.to_owned(), master),
            _ => (MASTER.to_owned(), master),
        });
        let moments = slots.iter().zip(&self.moments).flat_map(|((name, _), moment)| {
            let scales = moment.scales.iter().map(move |scales| (format!("{name}_scale"), scales));
            [((*name).to_owned(), &moment.elements)].into_iter().chain(scales)
        });
        step.chain(master).chain(moments)
    }
}

/// Name of an f16 parameter's master in a saved state. States of bf16 parameters had one too, in place of the
/// remainder.
pub(super) const MASTER: &str = "master";
/// Name of a bf16 parameter's remainder in a saved state.
pub(super) const REMAINDER: &str = "remainder";

impl Method {
    /// Returns the size of the state relative to the size of f32 parameters: 2 for Adam, 0 for SGD without
    /// momentum.
    pub fn state_factor(&self) -> f64 {
        self.state_factor_in(Kind::Float)
    }

    /// Returns the size of the state of matrices of this dtype relative to their own size. Includes masters, but not
    /// Adafactor's rows and columns.
    pub fn state_factor_in(&self, kind: Kind) -> f64 {
        let each = |kind: Kind| {
            let scale = if is_eight_bit(kind) { 4.0 / GROUP as f64 } else { 0.0 };
            kind.elt_size_in_bytes() as f64 + scale
        };
        self.kinds(kind, 2).map(each).sum::<f64>() / kind.elt_size_in_bytes() as f64
    }

    /// Returns the dtypes of the state's elements for each element of a parameter of this many dimensions.
    fn kinds(&self, kind: Kind, dimensions: usize) -> impl Iterator<Item = Kind> {
        let format = self.format();
        let moments = self.moments(dimensions).iter().enumerate();
        let whole = moments.filter(|(_, (_, extent))| *extent == Extent::Whole);
        let kinds = whole.map(move |(at, _)| format.kind(kind, at));
        master_kind(kind).into_iter().chain(kinds)
    }

    /// Returns the number of bytes of the state of these parameters, which their first step allocates.
    pub(crate) fn state_bytes<'a>(&self, parameters: impl IntoIterator<Item = &'a Tensor>) -> u64 {
        let of_one = |p: &Tensor| {
            let (method, dimensions) = (self.of(p.dim()), p.dim());
            let step = if method.counts() { 4 } else { 0 };
            let each = |kind: Kind| {
                let scales = if is_eight_bit(kind) { 4 * scales_of(p.numel()) } else { 0 };
                kind.elt_size_in_bytes() * p.numel() + scales
            };
            let parts =
                method.moments(dimensions).iter().filter_map(|slot| slot.1.shape(&p.size()));
            let number = StateFormat::F32.kind(p.kind(), 0).elt_size_in_bytes();
            let parts: usize =
                parts.map(|shape| shape.iter().product::<i64>() as usize * number).sum();
            method.kinds(p.kind(), dimensions).map(each).sum::<usize>() + parts + step
        };
        parameters.into_iter().map(|parameter| of_one(parameter) as u64).sum()
    }
}

/// Returns the dtype of [`ParameterState::master`] for a parameter of this dtype, if it has one.
fn master_kind(parameter: Kind) -> Option<Kind> {
    match parameter {
        Kind::BFloat16 => Some(Kind::Int16),
        Kind::Half => Some(Kind::Float),
        _ => None,
    }
}

/// Returns the parameter's version: the number of its in-place changes.
pub(super) fn version(tensor: &Tensor) -> i64 {
    tensor.f_internal_version().unwrap_or(UNKNOWN_VERSION)
}

/// Largest number of elements of a master that are refreshed at a time, unless one row has more.
const REFRESHED: usize = 1 << 20;

/// Splits the tensor into pieces along its first dimension.
fn pieces(tensor: &Tensor) -> Result<Vec<Tensor>> {
    match tensor.size().first() {
        Some(rows) if tensor.numel() > 0 => Ok(tensor.f_split(rows_of_piece(tensor, *rows), 0)?),
        _ => Ok(vec![tensor.shallow_clone()]),
    }
}

fn rows_of_piece(tensor: &Tensor, rows: i64) -> i64 {
    let row = tensor.numel() as i64 / rows;
    (REFRESHED as i64 / row).clamp(1, rows)
}

/// Returns the scratch space that [`ParameterState::refresh`] needs, in elements of each dtype.
pub(super) fn refresh_scratch(tensor: &Tensor, device: Device) -> [((Kind, Device), usize); 3] {
    let elements = match tensor.size().first() {
        Some(&rows) if tensor.numel() > 0 => {
            tensor.numel() / rows as usize * rows_of_piece(tensor, rows) as usize
        }
        _ => tensor.numel(),
    };
    [tensor.kind(), Kind::Float, Kind::Bool].map(|kind| ((kind, device), elements))
}

/// Returns scratch space of this dtype with the shape of `like`.
fn scratch_like(scratch: &[Tensor], kind: Kind, like: &Tensor) -> Result<Tensor> {
    let mut all = scratch.iter();
    let space = all.find(|space| (space.kind(), space.device()) == (kind, like.device()));
    let space = space.expect("there is scratch space for every master that is stale");
    Ok(space.f_narrow(0, 0, like.numel() as i64)?.f_view(like.size().as_slice())?)
}

/// Creates the master of a half-precision parameter. For f16, it has the old master's values where these still
/// round to the parameter's, and the parameter's values elsewhere. For bf16, it is the old remainder, or zeros.
fn new_master(tensor: &Tensor, in_place: bool, old: Option<&Tensor>) -> Result<Option<Tensor>> {
    let Some(kind) = master_kind(tensor.kind()) else { return Ok(None) };
    let mut master = empty_beside(tensor, kind, in_place)?;
    let old = old.filter(|old| old.kind() == kind);
    let old = old.map(|old| old.f_to_device(tensor.device())).transpose()?;
    match (old, kind) {
        (Some(old), Kind::Int16) => master.f_copy_(&old)?,
        (None, Kind::Int16) => drop(master.f_zero_()?),
        (Some(old), _) => {
            let unchanged = old.f_to_kind(tensor.kind())?.f_eq_tensor(tensor)?;
            master.f_copy_(&tensor.f_detach()?)?;
            let kept = old.f_where_self(&unchanged, &master)?;
            master.f_copy_(&kept)?;
        }
        (None, _) => master.f_copy_(&tensor.f_detach()?)?,
    }
    Ok(Some(master))
}

/// Returns the remainder of a bf16 parameter that is rounded from this f32 master.
pub(super) fn remainder_of(master: &Tensor) -> Result<Tensor> {
    let bits = master.f_contiguous()?.f_view_dtype(Kind::Int)?;
    let weight = bits.f_add_scalar(1 << 15)?.f_bitwise_right_shift_tensor_scalar(16)?;
    let rounded = weight.f_bitwise_left_shift_tensor_scalar(16)?;
    Ok(bits.f_sub(&rounded)?.f_to_kind(Kind::Int16)?)
}

/// Allocates a tensor of this dtype with the parameter's shape, and its strides if it is updated in place.
fn empty_beside(tensor: &Tensor, kind: Kind, in_place: bool) -> Result<Tensor> {
    let like = (kind, tensor.device());
    let empty = match in_place {
        true => Tensor::f_empty_strided(tensor.size(), tensor.stride(), like)?,
        false => Tensor::f_empty(tensor.size(), like)?,
    };
    prefer_large_pages(&empty);
    Ok(empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::update::{Adafactor, AdamW, Muon, Sgd};

    #[test]
    fn the_factor_of_a_number_type_is_what_a_parameter_of_it_takes() {
        let methods: [Method; 7] = [
            Sgd::new(0.1).into(),
            Sgd::new(0.1).momentum(0.9).into(),
            AdamW::new(0.1).into(),
            AdamW::new(0.1).state_format(StateFormat::Bf16).into(),
            AdamW::new(0.1).state_format(StateFormat::EightBit).into(),
            Adafactor::new(0.1).into(),
            Muon::new(0.1).into(),
        ];
        for method in methods {
            for kind in [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16] {
                let parameter = Tensor::zeros([32, 32], (kind, Device::Cpu));
                let counter = if method.counts() { 4 } else { 0 };
                let factors = if method.name() == "adafactor" { 64 } else { 0 };
                let factors = factors * StateFormat::F32.kind(kind, 0).elt_size_in_bytes() as u64;
                let bytes = (method.state_bytes([&parameter]) - counter - factors) as f64;
                let own = (parameter.numel() * kind.elt_size_in_bytes()) as f64;
                assert_eq!(method.state_factor_in(kind), bytes / own, "{method:?} in {kind:?}");
            }
        }
    }
}
