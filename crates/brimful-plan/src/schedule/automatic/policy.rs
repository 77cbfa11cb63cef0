//! Policies by which a free device chooses its next action.

/// Largest number of micro-batches that a stage may hold, memory permitting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Depth {
    /// Limit of 1F1B: the number of stages from this one to the last.
    ToTheLast,
    /// Limit of zero-bubble H1: the number of stages.
    AllStages,
    /// Enough for a micro-batch to go to the last stage and its gradient to come back: twice the number of stages,
    /// less one.
    ThereAndBack,
    /// No limit.
    All,
}

impl Depth {
    const CHOICES: [Self; 4] = [Self::ToTheLast, Self::AllStages, Self::ThereAndBack, Self::All];

    /// Returns the limit for one stage of `stages`.
    pub(super) fn of(self, stage: usize, stages: usize) -> usize {
        match self {
            Self::ToTheLast => stages - stage,
            Self::AllStages => stages,
            Self::ThereAndBack => 2 * stages - 1,
            Self::All => usize::MAX,
        }
    }
}

/// Set of backwards that are split. Splitting has a price: both parts together take longer than the whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Halved {
    /// No backward.
    None,
    /// The last micro-batches, as many as there are stages: before them the devices are busy anyway.
    Last,
    /// The first and the last micro-batches, as many as there are stages each.
    Ends,
    /// All backwards.
    All,
}

impl Halved {
    /// Returns whether the backward of micro-batch `i` of `m` is split.
    pub(super) fn splits(self, i: usize, m: usize, stages: usize) -> bool {
        match self {
            Self::None => false,
            Self::Last => i + stages >= m,
            Self::Ends => i + stages >= m || i < stages,
            Self::All => true,
        }
    }
}

/// Preferences of a device with several possible actions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Policy {
    pub(super) depth: Depth,
    /// Whether forwards go before gradients if both are ready.
    pub(super) forward_first: bool,
    /// Part of a forward's time by which it may delay an arriving gradient.
    pub(super) forward_delay: f64,
    /// Part of a weight gradient's time by which it may delay an arriving input.
    pub(super) weight_delay: f64,
    pub(super) halved: Halved,
}

impl Policy {
    /// Returns all policies to try, dissimilar ones first.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let whole = Self {
            depth: Depth::AllStages,
            forward_first: false,
            forward_delay: 1.0,
            weight_delay: 0.0,
            halved: Halved::None,
        };
        let wholes = [whole, Self { forward_delay: 0.0, ..whole }].into_iter();
        let rules = whole.with_splits().chain(wholes);
        rules.flat_map(|rule| Depth::CHOICES.map(|depth| Self { depth, ..rule }))
    }

    fn with_splits(self) -> impl Iterator<Item = Self> {
        let first = [false, true].map(|forward_first| Self { forward_first, ..self }).into_iter();
        let delayed = first
            .flat_map(|policy| [0.5, 0.0, 1.0].map(|weight_delay| Self { weight_delay, ..policy }));
        delayed.flat_map(|policy| {
            [Halved::Last, Halved::All, Halved::Ends].map(|halved| Self { halved, ..policy })
        })
    }
}
