//! Computes updates before the step that asks for them, into a second copy of the state: nothing changes
//! until a step takes the copy over.
//!
//! ```text
//!   look_ahead    piece by piece: the next state into the second copy                         may be dropped
//!   step          gradient, parameter and options unchanged?  swap the copies : update as usual
//! ```

use brimful_torch::foreach;
use brimful_torch::optim::fits;
use tch::{Kind, Tensor};

use super::method::{Lists, Method, UpdateBeside};
use super::state::{ParameterState, UNKNOWN_VERSION, empty_like, has_master, version};
use super::{Optimizer, Parameter};
use crate::Result;
use crate::batch::tensor_bytes;
use crate::memory;
use brimful_plan::plan::LookAhead;

/// An eighth of the host's memory stays free: updates computed early must not starve other processes.
const SPARED_SHARE: u64 = 8;

/// Number of elements computed at a time, before checking whether to continue.
const PIECE: i64 = 1 << 20;
/// Kernels work on 16 elements at a time, so results do not depend on the cut if pieces are multiples of
/// 16.
const UNIT: i64 = 16;

/// Part that a step updates first. It is wanted at once, so there is nothing to hide its update behind.
pub(crate) const FIRST_PART: usize = 0;

impl Method {
    /// Returns the memory that computing updates early takes, for a
    /// [plan](brimful_plan::plan::Request::look_ahead) with offloaded stages; `None` for a method whose update is
    /// a single addition.
    ///
    /// # Errors
    /// When the system does not report the host's memory.
    pub fn ahead_needs(&self, kind: Kind) -> Result<Option<LookAhead>> {
        let state = self.state_factor_in(kind);
        if state == 0.0 {
            return Ok(None);
        }
        // A copy of the parameter is needed too where there is no master.
        let bytes = if has_master(kind, self) { state } else { state + 1.0 };
        let spared = memory::host()?.total.0 / SPARED_SHARE;
        Ok(Some(LookAhead { bytes, spared }))
    }
}

/// Second state of a parameter, and the tensor that updates go to: its master, or a copy of the parameter.
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
    /// Allocates a second state like `state`, for a parameter with the strides of `layout`.
    fn like(state: &ParameterState, layout: &Tensor) -> Result<Self> {
        let state = state.empty_beside()?;
        let work = match &state.master {
            Some(master) => master.shallow_clone(),
            None => empty_like(layout)?,
        };
        Ok(Self { state, work, ahead: None })
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
        for tensor in self.numbers()? {
            for (start, length) in pieces(&tensor).take_while(|_| go_on()) {
                let _ = tensor.f_narrow(0, start, length)?.f_zero_()?;
            }
        }
        Ok(())
    }

    /// Whether its memory fits: the parameter may have changed its dtype or strides since.
    fn suits(&self, tensor: &Tensor, state: &ParameterState) -> bool {
        self.state.master.is_some() == state.master.is_some()
            && fits(state.master.as_ref().unwrap_or(tensor), &self.work)
    }

    /// Returns the parameter and its moments as flat tensors.
    fn numbers(&self) -> Result<Vec<Tensor>> {
        numbers(&self.work, &self.state)
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
        let now = numbers(state.master.as_ref().unwrap_or(tensor), state)?;
        let (next, gradient) = (self.numbers()?, flat(gradient)?);
        let taken = state.step.as_ref().map_or(Ok(0.0), |step| step.f_double_value(&[]))?;
        for (start, length) in pieces(&gradient) {
            if !go_on() {
                return Ok(false);
            }
            let piece = |tensor: &Tensor| tensor.f_narrow(0, start, length);
            let piece_of = |all: &[Tensor]| all.iter().map(piece).collect::<Result<Vec<_>, _>>();
            let (now, next) = (&piece_of(&now)?[..], &piece_of(&next)?[..]);
            let update =
                UpdateBeside { now, gradient: &piece(&gradient)?, next, step: taken + 1.0 };
            let is_whole = length % UNIT == 0;
            if !is_whole || !method.update_beside(&update)? {
                update.by_copies(method, state.step.as_ref())?;
            }
        }
        match &self.state.step {
            Some(step) => Ok(step.shallow_clone().f_fill_(taken + 1.0).map(|_| true)?),
            None => Ok(true),
        }
    }
}

impl UpdateBeside<'_> {
    /// Copies the present values and updates the copies. `taken` counts the steps before this one.
    fn by_copies(&self, method: &Method, taken: Option<&Tensor>) -> Result<()> {
        foreach::copy(self.next, self.now)?;
        let mut next = self.next.iter().map(|tensor| vec![tensor.shallow_clone()]);
        let lists = Lists {
            parameters: next.next().unwrap_or_default(),
            gradients: vec![self.gradient.shallow_clone()],
            moments: next.collect(),
            // The kernel increments the counter, and would do so for every piece.
            steps: taken.map(Tensor::f_detach_copy).transpose()?.into_iter().collect(),
            first: false,
            rate: None,
        };
        Ok(method.update(&lists)?)
    }
}

/// Returns a parameter, or its master, and its moments as flat tensors.
fn numbers(parameter: &Tensor, state: &ParameterState) -> Result<Vec<Tensor>> {
    std::iter::once(parameter).chain(&state.moments).map(flat).collect()
}

fn flat(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_as_strided([tensor.numel() as i64], [1], None)?)
}

/// Returns the start and length of each piece. The last piece is the rest that does not fill a register:
/// kernels round such elements differently.
fn pieces(flat: &Tensor) -> impl Iterator<Item = (i64, i64)> + use<> {
    let numbers = flat.numel() as i64;
    let rest = numbers % UNIT;
    let whole = numbers - rest;
    let pieces = (0..whole).step_by(PIECE as usize);
    let pieces = pieces.map(move |start| (start, PIECE.min(whole - start)));
    pieces.chain((rest > 0).then_some((whole, rest)))
}

/// Number of bytes of a second state for a parameter like this.
fn second_bytes(state: &ParameterState, parameter: &Tensor) -> u64 {
    state.moments.iter().chain([parameter]).map(tensor_bytes).sum()
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
        let dense = state.master.as_ref().unwrap_or(tensor);
        if !tensor.requires_grad()
            || tensor.numel() == 0
            || !fits(dense, dense)
            || !fits(dense, gradient)
        {
            return Ok(());
        }
        let Some(next) = self.second.as_mut().filter(|second| second.ahead.is_none()) else {
            return Ok(());
        };
        if !next.suits(tensor, state) {
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

    /// Returns the state, and a tensor with the strides of the second state, where a second state is
    /// missing. The strides come from the state because the parameter itself may be on its way to a device
    /// buffer. Without master and moments an update is one addition, which is not worth computing early.
    fn lacks_second(&self) -> Option<(&ParameterState, &Tensor)> {
        let part = self.offload.as_ref().map_or(FIRST_PART, |offload| offload.part);
        if part == FIRST_PART || self.second.is_some() {
            return None;
        }
        let state = self.state.as_ref()?;
        Some((state, state.master.as_ref().or(state.moments.first())?))
    }

    /// Number of bytes of its second state, if it has one.
    fn second_bytes(&self) -> u64 {
        self.second.as_ref().map_or(0, |second| second_bytes(&second.state, &second.work))
    }

    /// Makes the second state, if it is computed, the state; the old one becomes memory for the next.
    pub(super) fn take_over(&mut self) {
        let next = self.second.take_if(|second| second.ahead.is_some());
        let Some(SecondState { state, work, .. }) = next else { return };
        if let Some(old) = self.state.replace(state) {
            let work = old.master.as_ref().map_or(work, Tensor::shallow_clone);
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
        parameter.look_ahead(gradient, &groups[parameter.group].method, &go_on)
    }

    /// Allocates second states and touches their memory, while `go_on` allows: getting pages from the
    /// system takes longer than computing the updates.
    pub(crate) fn allocate_ahead(&mut self, go_on: impl Fn() -> bool) -> Result<()> {
        if !self.parameters.iter().any(|parameter| parameter.lacks_second().is_some()) {
            return Ok(());
        }
        let mut free = self.free_bytes_ahead()?;
        for parameter in self.parameters.iter_mut().take_while(|_| go_on()) {
            let Some((state, layout)) = parameter.lacks_second() else { continue };
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
    use crate::optim::{AdamW, OffloadedParameter, Sgd};
    use brimful_torch::autograd::set_gradient;
    use tch::Device;

    /// Returns an optimizer of two parameters that has taken a step.
    fn optimizer(method: Method, kind: Kind) -> Optimizer {
        let number = |at: i64| {
            // The second one has two pieces and a rest.
            let columns = [6, PIECE / 5 + 7][at as usize];
            let values = Tensor::arange(5 * columns, (Kind::Float, Device::Cpu)) / (at + 7);
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
        let methods: [Method; 4] = [
            AdamW::new(0.1).into(),
            AdamW::new(0.1).amsgrad(true).into(),
            Sgd::new(0.1).into(),
            Sgd::new(0.1).momentum(0.9).into(),
        ];
        let kinds = [Kind::Float, Kind::Double, Kind::BFloat16];
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
            assert_eq!(own as f64 * planned, taken as f64, "{method:?} {kind:?}");
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
