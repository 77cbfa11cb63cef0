//! Computes updates before the step that asks for them, into a second copy of the state: nothing changes
//! until a step takes the copy over.
//!
//! ```text
//!   look_ahead    piece by piece: the next state into the second copy                         may be dropped
//!   step          gradient, parameter and options unchanged?  swap the copies : update as usual
//! ```

use brimful_torch::optim::{self as fused, fits};
use tch::{Kind, Tensor};

use super::state::{Moment, ParameterState, UNKNOWN_VERSION, empty_beside, flat, version};
use super::{Method, Optimizer, Parameter};
use crate::Result;
use crate::batch::tensor_bytes;
use crate::memory;
use brimful_plan::plan::LookAhead;

/// An eighth of the host's memory stays free: updates computed early must not starve other processes.
const SPARED_SHARE: u64 = 8;

/// Number of elements computed at a time, before checking whether to continue.
const PIECE: i64 = 1 << 20;

/// Part that a step updates first. It is wanted at once, so there is nothing to hide its update behind.
pub(crate) const FIRST_PART: usize = 0;

impl Method {
    /// Returns the memory that computing updates early takes, for a
    /// [plan](brimful_plan::plan::Request::look_ahead) with offloaded stages; `None` for a method whose update is
    /// a single addition, or needs whole parameters.
    ///
    /// # Errors
    /// When the system does not report the host's memory.
    pub fn ahead_needs(&self, kind: Kind) -> Result<Option<LookAhead>> {
        let state = self.state_factor_in(kind);
        if state == 0.0 || self.is_whole() {
            return Ok(None);
        }
        // A copy of the parameter is needed too.
        let bytes = state + 1.0;
        let spared = memory::host()?.total.0 / SPARED_SHARE;
        Ok(Some(LookAhead { bytes, spared }))
    }
}

/// Second state of a parameter, and the copy of the parameter that updates go to.
#[derive(Debug)]
pub(super) struct SecondState {
    state: ParameterState,
    pub(super) work: Tensor,
    /// Inputs that it was computed from; `None` while it is only allocated memory.
    ahead: Option<Ahead>,
}

/// Inputs that a parameter's next state was computed from.
#[derive(Debug)]
struct Ahead {
    method: Method,
    parameter_version: i64,
    /// Address of the gradient, not the gradient itself, so that its memory is freed with its last owner.
    gradient: usize,
    gradient_version: i64,
}

impl SecondState {
    /// Allocates a second state like `state`, for a parameter of this dtype.
    fn like(state: &ParameterState, (layout, kind): (&Tensor, Kind)) -> Result<Self> {
        Ok(Self {
            state: state.empty_beside()?,
            work: empty_beside(layout, kind, true)?,
            ahead: None,
        })
    }

    /// Whether it holds the result of a step with this gradient.
    pub(super) fn is_of(&self, tensor: &Tensor, gradient: &Tensor, method: &Method) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| {
            let versions = [ahead.parameter_version, ahead.gradient_version];
            ahead.method == *method
                && ahead.gradient == gradient.data_ptr() as usize
                && versions == [version(tensor), version(gradient)]
                && !versions.contains(&UNKNOWN_VERSION)
        })
    }

    /// Writes to all of the memory, so that the system provides the pages, piece by piece while `go_on`
    /// allows.
    fn touch(&self, go_on: &impl Fn() -> bool) -> Result<()> {
        let state = self.state.moments.iter().map(|moment| &moment.elements);
        for tensor in [&self.work].into_iter().chain(&self.state.master).chain(state) {
            let tensor = flat(tensor)?;
            for (start, length) in pieces(&tensor).take_while(|_| go_on()) {
                let _ = tensor.f_narrow(0, start, length)?.f_zero_()?;
            }
        }
        Ok(())
    }

    /// Whether its memory fits: the parameter may have changed its dtype or strides since.
    fn suits(&self, tensor: &Tensor, method: &Method) -> bool {
        self.state.suits(tensor, method)
            && fits(tensor, &self.work)
            && self.work.kind() == tensor.kind()
    }

    /// Computes the step with this gradient from the parameter and its state into this one. Returns false
    /// if `go_on` stopped it before the end.
    fn advance(
        &self,
        (tensor, state): (&Tensor, &ParameterState),
        gradient: &Tensor,
        method: &Method,
        go_on: &impl Fn() -> bool,
    ) -> Result<bool> {
        let step = state.step.as_ref();
        for (start, length) in pieces(gradient) {
            if !go_on() {
                return Ok(false);
            }
            let piece =
                |tensor: &Tensor| Ok::<_, crate::Error>(flat(tensor)?.f_narrow(0, start, length)?);
            let gradient = piece(gradient)?;
            let piece = |parameter: &Tensor, state: &ParameterState| {
                let master = state.master.as_ref().map(piece).transpose()?;
                let moments = state.moments.iter().map(|moment| moment.piece(start, length));
                Ok::<_, crate::Error>((
                    piece(parameter)?,
                    master,
                    moments.collect::<Result<Vec<_>>>()?,
                ))
            };
            let (now, next) = (piece(tensor, state)?, piece(&self.work, &self.state)?);
            let moments = [&now, &next].map(|of| of.2.iter().map(Moment::lend).collect::<Vec<_>>());
            let [now, next] = [(&now, &moments[0]), (&next, &moments[1])].map(|(of, moments)| {
                let (parameter, master, gradient) = (&of.0, of.1.as_ref(), &gradient);
                fused::Update { parameter, gradient, master, step, moments, first: false }
            });
            fused::update_beside(&now, &next, &method.options())?;
        }
        match (step, &self.state.step) {
            (Some(now), Some(next)) => {
                Ok(next.shallow_clone().f_fill_(now.f_double_value(&[])? + 1.0).map(|_| true)?)
            }
            _ => Ok(true),
        }
    }
}

/// Returns the start and length of each piece.
fn pieces(tensor: &Tensor) -> impl Iterator<Item = (i64, i64)> + use<> {
    let numbers = tensor.numel() as i64;
    (0..numbers).step_by(PIECE as usize).map(move |start| (start, PIECE.min(numbers - start)))
}

/// Number of bytes of a second state for a parameter of this dtype.
fn second_bytes(state: &ParameterState, (like, kind): (&Tensor, Kind)) -> u64 {
    let moments = state.moments.iter().flat_map(Moment::tensors);
    let state: u64 = state.master.iter().chain(moments).map(tensor_bytes).sum();
    state + (like.numel() * kind.elt_size_in_bytes()) as u64
}

impl Parameter {
    /// Computes the step with this gradient into the second state, if one is allocated.
    fn look_ahead(
        &mut self,
        gradient: &Tensor,
        method: &Method,
        go_on: &impl Fn() -> bool,
    ) -> Result<()> {
        let (tensor, state) = (&self.tensor, self.state.as_ref());
        let Some(state) = state.filter(|state| state.is_current(tensor, method)) else {
            return Ok(());
        };
        let is_double = |tensor: &Tensor| tensor.kind() == Kind::Double;
        if !tensor.requires_grad()
            || tensor.numel() == 0
            || !fits(tensor, gradient)
            || is_double(tensor) != is_double(gradient)
        {
            return Ok(());
        }
        let Some(next) = self.second.as_mut().filter(|second| second.ahead.is_none()) else {
            return Ok(());
        };
        if !next.suits(tensor, method) {
            self.second = None;
            return Ok(());
        }
        // Versions are read before any value: a change during the computation leads to another version
        // afterwards.
        let (parameter_version, gradient_version) = (version(tensor), version(gradient));
        match next.advance((tensor, state), gradient, method, go_on) {
            Ok(true) => {
                let (method, gradient) = (*method, gradient.data_ptr() as usize);
                next.ahead = Some(Ahead { method, parameter_version, gradient, gradient_version });
            }
            Ok(false) => (),
            Err(error) => {
                // The likeliest cause is that the host is out of memory.
                self.second = None;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the state, and a tensor with the strides of the second state with the parameter's dtype, where
    /// a second state is missing. The strides come from the state because the parameter itself may be on its
    /// way to a device buffer. Without master and moments an update is one addition, which is not worth
    /// computing early; one that needs the whole parameter is not computed in pieces.
    fn lacks_second(&self, method: &Method) -> Option<(&ParameterState, (&Tensor, Kind))> {
        let part = self.offload.as_ref().map_or(FIRST_PART, |offload| offload.part);
        let is_whole = method.of(self.tensor.dim()).is_whole();
        if part == FIRST_PART || self.second.is_some() || is_whole {
            return None;
        }
        let state = self.state.as_ref()?;
        let moment = state.moments.first().map(|moment| &moment.elements);
        Some((state, (state.master.as_ref().or(moment)?, self.tensor.kind())))
    }

    /// Number of bytes of its second state, if it has one.
    fn second_bytes(&self) -> u64 {
        self.second
            .as_ref()
            .map_or(0, |second| second_bytes(&second.state, (&second.work, second.work.kind())))
    }

    /// Makes the second state, if it is computed, the state; the old one becomes memory for the next.
    pub(super) fn take_over(&mut self) {
        let next = self.second.take_if(|second| second.ahead.is_some());
        let Some(SecondState { state, work, .. }) = next else { return };
        if let Some(old) = self.state.replace(state) {
            self.second = Some(SecondState { state: old, work, ahead: None });
        }
    }

    fn forget_ahead(&mut self) -> bool {
        self.second.as_mut().and_then(|second| second.ahead.take()).is_some()
    }
}

impl Optimizer {
    /// Computes the step of the parameter `name` with this gradient into its second state, until `go_on`
    /// returns false. The parameter and its state are unchanged until a step takes the second state over.
    pub(crate) fn look_ahead(
        &mut self,
        name: &str,
        gradient: &Tensor,
        go_on: impl Fn() -> bool,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let Self { parameters, groups, .. } = self;
        let Some(parameter) = parameters.iter_mut().find(|parameter| parameter.name == name) else {
            return Ok(());
        };
        let method = groups[parameter.group].method.of(parameter.tensor.dim());
        parameter.look_ahead(gradient, &method, &go_on)
    }

    /// Allocates second states and touches their memory, while `go_on` allows: getting pages from the
    /// system takes longer than computing the updates.
    pub(crate) fn allocate_ahead(&mut self, go_on: impl Fn() -> bool) -> Result<()> {
        let methods: Vec<_> = self.groups.iter().map(|group| group.method).collect();
        let lacks =
            |parameter: &Parameter| parameter.lacks_second(&methods[parameter.group]).is_some();
        if !self.parameters.iter().any(lacks) {
            return Ok(());
        }
        let mut free = self.free_bytes_ahead()?;
        for parameter in self.parameters.iter_mut().take_while(|_| go_on()) {
            let lacking = parameter.lacks_second(&methods[parameter.group]);
            let Some((state, layout)) = lacking else { continue };
            let Some(left) = free.checked_sub(second_bytes(state, layout)) else { continue };
            let second = {
                let _charged = parameter.enter_host_arena();
                SecondState::like(state, layout)?
            };
            second.touch(&go_on)?;
            (parameter.second, free) = (Some(second), left);
        }
        Ok(())
    }

    /// Free bytes for more second states in the host memory of offloaded parameters, beyond those allocated
    /// and those that a step needs.
    fn free_bytes_ahead(&self) -> Result<u64> {
        let made: u64 = self.parameters.iter().map(Parameter::second_bytes).sum();
        let arena = self.parameters.iter().find_map(|p| p.offload.as_ref()?.arena.as_ref());
        if let Some((arena, limit)) = arena.and_then(|arena| Some((arena, arena.limit()?))) {
            return Ok(limit.saturating_sub(arena.peak() + made));
        }
        let host = memory::host()?;
        Ok(host.available.0.saturating_sub(host.total.0 / SPARED_SHARE))
    }

    /// Whether a second state is computed that no step has taken over.
    pub(crate) fn has_ahead(&self) -> bool {
        let mut seconds = self.parameters.iter().filter_map(|parameter| parameter.second.as_ref());
        seconds.any(|second| second.ahead.is_some())
    }

    /// Discards computed second states that no step has taken over; returns whether there were any.
    pub(crate) fn forget_ahead(&mut self) -> bool {
        self.parameters.iter_mut().map(Parameter::forget_ahead).fold(false, |any, had| any | had)
    }

    /// Frees the second states as well.
    pub(crate) fn drop_ahead(&mut self) {
        self.parameters.iter_mut().for_each(|parameter| parameter.second = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;
    use crate::optim::{AdamW, OffloadedParameter, Sgd, StateFormat};
    use brimful_torch::autograd::set_gradient;
    use tch::Device;

    /// Returns an optimizer of two parameters that has taken a step.
    fn optimizer(method: Method, kind: Kind) -> Optimizer {
        let number = |at: i64| {
            // The second one has two pieces.
            let columns = [6, PIECE / 5 + 7][at as usize];
            let values = Tensor::arange(5 * columns, (Kind::Float, Device::Cpu)) / (at + 7);
            // Within the range of f16.
            let values = values.remainder(1000);
            values.view([5, columns]).to_kind(kind).set_requires_grad(true)
        };
        let named = (0..2).map(|at| (at.to_string(), number(at))).collect();
        let mut optimizer = Optimizer::for_named(named, method).expect("an optimizer");
        optimizer.set_offloaded(|_| Some(OffloadedParameter { part: 1, arena: None }));
        give(&mut optimizer, 1.0);
        optimizer.step().expect("a first step");
        optimizer
    }

    /// Sets new gradients, in new tensors.
    fn give(optimizer: &mut Optimizer, factor: f64) {
        for Parameter { tensor, state, .. } in &mut optimizer.parameters {
            let kind = state
                .as_ref()
                .and_then(|state| state.master.as_ref())
                .map_or(tensor.kind(), |_| Kind::Float);
            let gradient = (tensor.detach().to_kind(kind).sin() * factor).contiguous();
            set_gradient(tensor, Some(&gradient)).expect("a gradient");
        }
    }

    fn look_ahead(optimizer: &mut Optimizer) {
        optimizer.allocate_ahead(|| true).expect("memory");
        let gradients: Vec<_> =
            optimizer.parameters().map(|(name, tensor)| (name.to_owned(), tensor.grad())).collect();
        for (name, gradient) in gradients {
            optimizer.look_ahead(&name, &gradient, || true).expect("ahead");
        }
    }

    fn numbers(optimizer: &Optimizer) -> Vec<Tensor> {
        let parameters = optimizer.parameters().map(|(_, tensor)| tensor.detach().copy());
        let (state, _) = optimizer.state();
        parameters.chain(state.into_iter().map(|(_, tensor)| tensor.copy())).collect()
    }

    /// Takes three steps, with or without computing each update early, and calls `before` ahead of each.
    fn three_steps(
        method: Method,
        kind: Kind,
        ahead: bool,
        before: fn(&mut Optimizer),
    ) -> Vec<Tensor> {
        let mut optimizer = optimizer(method, kind);
        for number in 0..3 {
            optimizer.forget_ahead();
            give(&mut optimizer, f64::from(number) - 0.5);
            if ahead {
                look_ahead(&mut optimizer);
            }
            before(&mut optimizer);
            optimizer.step().expect("a step");
        }
        numbers(&optimizer)
    }

    fn cases() -> Vec<(Method, Kind)> {
        let methods: [Method; 5] = [
            AdamW::new(0.1).into(),
            AdamW::new(0.1).state_format(StateFormat::EightBit).into(),
            AdamW::new(0.1).amsgrad(true).into(),
            Sgd::new(0.1).into(),
            Sgd::new(0.1).momentum(0.9).into(),
        ];
        let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
        methods.into_iter().flat_map(|method| kinds.map(|kind| (method, kind))).collect()
    }

    #[test]
    fn a_step_that_was_looked_ahead_of_is_the_same_to_the_last_bit() {
        for (method, kind) in cases() {
            let takes_over = |optimizer: &mut Optimizer| {
                let plan = optimizer.prepare().expect("a plan");
                assert_eq!(plan.takes_over(), optimizer.has_ahead());
            };
            let [plain, ahead] =
                [false, true].map(|ahead| three_steps(method, kind, ahead, takes_over));
            assert!(plain.iter().zip(&ahead).all(|(a, b)| a.equal(b)), "{method:?} {kind:?}");
        }
    }

    #[test]
    fn what_changes_before_the_step_counts() {
        let changes: [fn(&mut Optimizer); 5] = [
            |optimizer| drop(optimizer.clip_gradient_norm(0.01).expect("clipped")),
            |optimizer| optimizer.set_learning_rate(0.3).expect("a rate"),
            |optimizer| {
                let mut tensor = optimizer.parameters[0].tensor.shallow_clone();
                tch::no_grad(|| drop(tensor.fill_(0.5)));
            },
            |optimizer| {
                let (tensors, metadata) = self::optimizer(
                    optimizer.groups[0].method,
                    optimizer.parameters[0].tensor.kind(),
                )
                .state();
                optimizer.load_state(&tensors, &metadata).expect("another state");
            },
            |optimizer| give(optimizer, 2.0),
        ];
        for (method, kind) in cases() {
            for (number, change) in changes.into_iter().enumerate() {
                let [plain, ahead] =
                    [false, true].map(|ahead| three_steps(method, kind, ahead, change));
                let same = plain.iter().zip(&ahead).all(|(a, b)| a.equal(b));
                assert!(same, "{method:?} {kind:?}, change {number}");
            }
        }
    }

    #[test]
    fn a_plan_counts_what_second_states_take() {
        for (method, kind) in cases() {
            let mut optimizer = optimizer(method, kind);
            optimizer.allocate_ahead(|| true).expect("memory");
            let own: u64 = optimizer.parameters().map(|(_, tensor)| tensor_bytes(tensor)).sum();
            let taken: u64 = optimizer.parameters.iter().map(Parameter::second_bytes).sum();
            let planned =
                method.ahead_needs(kind).expect("a host").map_or(0.0, |ahead| ahead.bytes);
            // The last group of each 8-bit moment may be shorter than others.
            let rest = taken as f64 - own as f64 * planned;
            assert!((0.0..32.0).contains(&rest), "{method:?} {kind:?}: {rest}");
        }
    }

    #[test]
    fn a_host_without_free_memory_has_no_second_state() {
        for (limit, expected) in [(1 << 20, true), (700, false)] {
            let arena = Arena::limited("host", limit).expect("a limit");
            let mut optimizer = optimizer(AdamW::new(0.1).into(), Kind::Double);
            let offload = OffloadedParameter { part: 1, arena: Some(arena.clone()) };
            optimizer.set_offloaded(|_| Some(offload.clone()));
            give(&mut optimizer, 1.0);
            look_ahead(&mut optimizer);
            assert_eq!((optimizer.has_ahead(), arena.current() > 0), (expected, expected));
            optimizer.step().expect("a step");
        }
    }
}
