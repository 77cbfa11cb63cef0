//! What an optimizer remembers of one parameter.

use brimful_torch::optim::fits;
use tch::{Device, Kind, Tensor};

use super::Method;
use crate::Result;

/// The memory of one parameter's steps.
#[derive(Debug)]
pub(super) struct ParameterState {
    /// The parameter in f32, where it is itself in half precision: what updates go to.
    pub(super) master: Option<Tensor>,
    /// The parameter's version when it was last rounded from `master`.
    pub(super) version: i64,
    /// How many steps were taken: one f32, on the parameter's device.
    pub(super) step: Option<Tensor>,
    /// The tensors of [`Method::moments`].
    pub(super) moments: Vec<Tensor>,
}

/// No parameter has this version, so its master is compared with it before it is used.
pub(super) const UNKNOWN_VERSION: i64 = -1;

impl ParameterState {
    /// A state for this parameter as it is now; what `old` holds is taken over. The parameter may
    /// have changed its kind, device or layout since.
    pub(super) fn new(tensor: &Tensor, method: &Method, old: Option<&Self>) -> Result<Self> {
        let master = has_master(tensor, method).then(|| new_master(tensor, old)).transpose()?;
        let like = master.as_ref().unwrap_or(tensor);
        let step = match old.and_then(|old| old.step.as_ref()) {
            Some(step) => Some(step.f_to_device(tensor.device())?),
            None if method.counts() => Some(zero_step(tensor.device())?),
            None => None,
        };
        let moments = (0..method.moments().len())
            .map(|index| new_moment(like, old.map(|old| &old.moments[index])))
            .collect::<Result<_>>()?;
        Ok(Self { master, version: version(tensor), step, moments })
    }

    /// Whether the parameter can be updated with this state as it is.
    pub(super) fn is_current(&self, tensor: &Tensor, method: &Method) -> bool {
        let like = self.master.as_ref().unwrap_or(tensor);
        let dense = fits(like, like);
        self.master.is_some() == has_master(tensor, method)
            && (self.master.is_none() || self.version == version(tensor))
            && like.device() == tensor.device()
            // ParameterState of a parameter with gaps is contiguous, as the copy that is updated.
            && self.moments.iter().all(|moment| {
                if dense { fits(like, moment) } else { moment.is_contiguous() && alike(like, moment) }
            })
    }

    /// The state's tensors with their names.
    pub(super) fn tensors(&self, method: &Method) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let step = self.step.iter().map(|step| ("step", step));
        let master = self.master.iter().map(|master| ("master", master));
        step.chain(master).chain(method.moments().iter().copied().zip(&self.moments))
    }
}

impl Method {
    /// What is kept of parameters, over what these take themselves: 2 by Adam, 0 by SGD without
    /// momentum. Half-precision parameters whose state is in f32 have more.
    pub fn state_factor(&self) -> f64 {
        self.moments().len() as f64
    }

    /// What the state of these parameters takes, which their first step makes.
    pub(crate) fn state_bytes<'a>(&self, parameters: impl IntoIterator<Item = &'a Tensor>) -> u64 {
        parameters.into_iter().map(|parameter| self.bytes_of_one(parameter)).sum()
    }

    fn bytes_of_one(&self, parameter: &Tensor) -> u64 {
        let master = has_master(parameter, self);
        let size = if master { 4 } else { parameter.kind().elt_size_in_bytes() };
        let tensors = self.moments().len() + usize::from(master);
        let step = if self.counts() { 4 } else { 0 };
        (tensors * size * parameter.numel() + step) as u64
    }
}

/// Whether updates go to an f32 copy of the parameter.
pub(super) fn has_master(tensor: &Tensor, method: &Method) -> bool {
    matches!(tensor.kind(), Kind::Half | Kind::BFloat16) && !method.half_state()
}

/// How often the parameter was changed in place.
pub(super) fn version(tensor: &Tensor) -> i64 {
    tensor.f_internal_version().unwrap_or(UNKNOWN_VERSION)
}

/// The parameter in f32. Where it is still what the old master was rounded to, the old one's digits
/// are kept; where somebody has set it since, its own value counts.
fn new_master(tensor: &Tensor, old: Option<&ParameterState>) -> Result<Tensor> {
    let present = tensor.f_detach()?.f_to_kind(Kind::Float)?;
    let Some(master) = old.and_then(|old| old.master.as_ref()) else { return Ok(present) };
    let master = master.f_to_device(tensor.device())?;
    let unchanged = master.f_to_kind(tensor.kind())?.f_eq_tensor(tensor)?;
    let mut kept = present.f_empty_like()?;
    kept.f_copy_(&master.f_where_self(&unchanged, &present)?)?;
    Ok(kept)
}

fn new_moment(like: &Tensor, old: Option<&Tensor>) -> Result<Tensor> {
    let mut moment = like.f_detach()?.f_zeros_like()?;
    if !fits(like, like) {
        moment = moment.f_contiguous()?;
    }
    if let Some(old) = old {
        moment.f_copy_(old)?;
    }
    Ok(moment)
}

pub(super) fn zero_step(device: Device) -> Result<Tensor> {
    Ok(Tensor::f_zeros([0_i64; 0], (Kind::Float, device))?)
}

fn alike(a: &Tensor, b: &Tensor) -> bool {
    (a.kind(), a.device(), a.size()) == (b.kind(), b.device(), b.size())
}
