//! State of one parameter in an optimizer.

use brimful_torch::host::prefer_large_pages;
use brimful_torch::optim::fits;
use tch::{Device, Kind, Tensor};

use super::Method;
use crate::Result;

/// Step counter, moments and master copy of one parameter.
#[derive(Debug)]
pub(super) struct ParameterState {
    /// Parameter in f32 that updates go to, where the parameter itself is in half precision.
    pub(super) master: Option<Tensor>,
    /// Version of the parameter when it was last rounded from `master`.
    pub(super) version: i64,
    /// Number of steps taken: one f32, on the parameter's device.
    pub(super) step: Option<Tensor>,
    /// Tensors of [`Method::moments`].
    pub(super) moments: Vec<Tensor>,
}

/// Version that no parameter has, so its master is compared with it before it is used.
pub(super) const UNKNOWN_VERSION: i64 = -1;

impl ParameterState {
    /// Creates a state for this parameter as it is now, with the values of `old`. The parameter may have
    /// changed its dtype, device or strides since.
    pub(super) fn new(tensor: &Tensor, method: &Method, old: Option<&Self>) -> Result<Self> {
        let master =
            has_master(tensor.kind(), method).then(|| new_master(tensor, old)).transpose()?;
        let like = master.as_ref().unwrap_or(tensor);
        let step = match old.and_then(|old| old.step.as_ref()) {
            Some(step) => Some(step.f_to_device(tensor.device())?),
            None if method.counts() => {
                Some(Tensor::f_zeros([0_i64; 0], (Kind::Float, tensor.device()))?)
            }
            None => None,
        };
        let moments = (0..method.moments().len())
            .map(|index| new_moment(like, old.map(|old| &old.moments[index])))
            .collect::<Result<_>>()?;
        Ok(Self { master, version: version(tensor), step, moments })
    }

    /// Allocates a second state like this one.
    pub(super) fn empty_beside(&self) -> Result<Self> {
        let empty = |tensor: &Option<Tensor>| tensor.as_ref().map(empty_like).transpose();
        let moments = self.moments.iter().map(empty_like).collect::<Result<_>>()?;
        let (master, step) = (empty(&self.master)?, empty(&self.step)?);
        Ok(Self { master, version: UNKNOWN_VERSION, step, moments })
    }

    /// Whether the parameter can be updated with this state as it is.
    pub(super) fn is_current(&self, tensor: &Tensor, method: &Method) -> bool {
        self.suits(tensor, method) && !self.is_stale(tensor)
    }

    /// Whether the parameter was set since it was rounded from its master.
    pub(super) fn is_stale(&self, tensor: &Tensor) -> bool {
        self.master.is_some() && self.version != version(tensor)
    }

    /// Whether it has the parameter's dtype, device and strides.
    pub(super) fn suits(&self, tensor: &Tensor, method: &Method) -> bool {
        let like = self.master.as_ref().unwrap_or(tensor);
        let dense = fits(like, like);
        self.master.is_some() == has_master(tensor.kind(), method)
            && like.device() == tensor.device()
            // The state of a parameter with gaps is contiguous, like the copy that is updated.
            && self.moments.iter().all(|moment| {
                if dense { fits(like, moment) } else { moment.is_contiguous() && alike(like, moment) }
            })
    }

    /// Copies the elements of the parameter that were set since into the master; the others keep their f32
    /// digits. Allocates nothing beyond the [scratch space](refresh_scratch) made for it.
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

    /// Returns the state's tensors with their names.
    pub(super) fn tensors(&self, method: &Method) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let step = self.step.iter().map(|step| ("step", step));
        let master = self.master.iter().map(|master| ("master", master));
        step.chain(master).chain(method.moments().iter().copied().zip(&self.moments))
    }
}

impl Method {
    /// Size of the state as a multiple of the parameters' size: 2 for Adam, 0 for SGD without momentum.
    /// Half-precision parameters whose state is in f32 have a larger one.
    pub fn state_factor(&self) -> f64 {
        self.moments().len() as f64
    }

    /// Size of the state of parameters of this dtype as a multiple of their size, f32 masters included.
    pub fn state_factor_in(&self, kind: Kind) -> f64 {
        self.bytes_of_number(kind) as f64 / kind.elt_size_in_bytes() as f64
    }

    /// Number of bytes of the state for each element.
    fn bytes_of_number(&self, kind: Kind) -> usize {
        let has_master = has_master(kind, self);
        let size = if has_master { Kind::Float } else { kind }.elt_size_in_bytes();
        (self.moments().len() + usize::from(has_master)) * size
    }

    /// Number of bytes of the state of these parameters, which their first step allocates.
    pub(crate) fn state_bytes<'a>(&self, parameters: impl IntoIterator<Item = &'a Tensor>) -> u64 {
        let step = if self.counts() { 4 } else { 0 };
        let of_one = |p: &Tensor| self.bytes_of_number(p.kind()) * p.numel() + step;
        parameters.into_iter().map(|parameter| of_one(parameter) as u64).sum()
    }
}

/// Whether a parameter of this dtype has an f32 master copy.
pub(super) fn has_master(kind: Kind, method: &Method) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16) && !method.half_state()
}

/// Number of in-place changes of the parameter.
pub(super) fn version(tensor: &Tensor) -> i64 {
    tensor.f_internal_version().unwrap_or(UNKNOWN_VERSION)
}

/// Number of elements of a master that are refreshed at a time, or one row.
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

/// Scratch space for [`ParameterState::refresh`], in elements of each dtype.
pub(super) fn refresh_scratch(tensor: &Tensor) -> [((Kind, Device), usize); 3] {
    let elements = match tensor.size().first() {
        Some(&rows) if tensor.numel() > 0 => {
            tensor.numel() / rows as usize * rows_of_piece(tensor, rows) as usize
        }
        _ => tensor.numel(),
    };
    [tensor.kind(), Kind::Float, Kind::Bool].map(|kind| ((kind, tensor.device()), elements))
}

/// Returns scratch space of this dtype with the shape of `like`.
fn scratch_like(scratch: &[Tensor], kind: Kind, like: &Tensor) -> Result<Tensor> {
    let mut all = scratch.iter();
    let space = all.find(|space| (space.kind(), space.device()) == (kind, like.device()));
    let space = space.expect("there is scratch space for every master that is stale");
    Ok(space.f_narrow(0, 0, like.numel() as i64)?.f_view(like.size().as_slice())?)
}

/// Returns the parameter in f32. Elements that still equal the rounded old master keep its digits; elements
/// that were set since have the parameter's value.
fn new_master(tensor: &Tensor, old: Option<&ParameterState>) -> Result<Tensor> {
    let mut present = empty_master(tensor)?;
    present.f_copy_(&tensor.f_detach()?)?;
    let Some(master) = old.and_then(|old| old.master.as_ref()) else { return Ok(present) };
    let master = master.f_to_device(tensor.device())?;
    let unchanged = master.f_to_kind(tensor.kind())?.f_eq_tensor(tensor)?;
    let mut kept = present.f_empty_like()?;
    kept.f_copy_(&master.f_where_self(&unchanged, &present)?)?;
    Ok(kept)
}

/// Allocates an f32 tensor with the parameter's shape and strides.
fn empty_master(tensor: &Tensor) -> Result<Tensor> {
    let like = (Kind::Float, tensor.device());
    let empty = match fits(tensor, tensor) {
        true => Tensor::f_empty_strided(tensor.size(), tensor.stride(), like)?,
        false => Tensor::f_empty(tensor.size(), like)?,
    };
    prefer_large_pages(&empty);
    Ok(empty)
}

/// Allocates a tensor like this one.
pub(super) fn empty_like(tensor: &Tensor) -> Result<Tensor> {
    let empty = tensor.f_detach()?.f_empty_like()?;
    prefer_large_pages(&empty);
    Ok(empty)
}

fn new_moment(like: &Tensor, old: Option<&Tensor>) -> Result<Tensor> {
    let mut moment = empty_like(like)?;
    if !fits(like, like) {
        moment = moment.f_contiguous()?;
    }
    match old {
        Some(old) => moment.f_copy_(old)?,
        None => drop(moment.f_zero_()?),
    }
    Ok(moment)
}

fn alike(a: &Tensor, b: &Tensor) -> bool {
    (a.kind(), a.device(), a.size()) == (b.kind(), b.device(), b.size())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::{AdamW, Sgd};

    #[test]
    fn the_factor_of_a_number_type_is_what_a_parameter_of_it_takes() {
        let methods: [Method; 4] = [
            Sgd::new(0.1).into(),
            Sgd::new(0.1).momentum(0.9).into(),
            AdamW::new(0.1).into(),
            AdamW::new(0.1).half_state(true).into(),
        ];
        for method in methods {
            for kind in [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16] {
                let parameter = Tensor::zeros([1 << 10], (kind, Device::Cpu));
                let counter = if method.counts() { 4 } else { 0 };
                let bytes = (method.state_bytes([&parameter]) - counter) as f64;
                let own = (parameter.numel() * kind.elt_size_in_bytes()) as f64;
                assert_eq!(method.state_factor_in(kind), bytes / own, "{method:?} in {kind:?}");
            }
        }
    }
}
