//! By which rules a free device chooses what it does next.

/// How many micro-batches a stage may hold, memory permitting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Depth {
    /// As many as 1F1B: the stages from this one to the last.
    ToTheLast,
    /// As many as zero-bubble H1: all stages.
    AllStages,
    /// As many as a gradient needs to go all the way and come back: twice the stages.
    ThereAndBack,
    /// As many as there are.
    All,
}

impl Depth {
    const CHOICES: [Self; 4] = [Self::ToTheLast, Self::AllStages, Self::ThereAndBack, Self::All];

    /// Of one stage of so many.
    pub(super) fn of(self, stage: usize, stages: usize) -> usize {
        match self {
            Self::ToTheLast => stages - stage,
            Self::AllStages => stages,
            Self::ThereAndBack => 2 * stages - 1,
            Self::All => usize::MAX,
        }
    }
}

/// Which backwards are split: halves together take longer than the whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Halved {
    /// None.
    None,
    /// Those of the last micro-batches, as many as there are stages: the rest of the step is busy without.
    Last,
    /// Those of the first and of the last micro-batches, as many as there are stages each.
    Ends,
    /// All.
    All,
}

impl Halved {
    /// Whether it splits the backward of micro-batch `i` of `m`.
    pub(super) fn splits(self, i: usize, m: usize, stages: usize) -> bool {
        match self {
            Self::None => false,
            Self::Last => i + stages >= m,
            Self::Ends => i + stages >= m || i < stages,
            Self::All => true,
        }
    }
}

/// What a device does when it could do several things.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Policy {
    pub(super) depth: Depth,
    /// Forwards before gradients, where both are ready.
    pub(super) forward_first: bool,
    /// By what part of a forward it may keep a gradient waiting that is on its way.
    pub(super) forward_delay: f64,
    /// By what part of a weight gradient it may keep waiting what is on its way.
    pub(super) weight_delay: f64,
    pub(super) halved: Halved,
}

impl Policy {
    /// All that are tried, unlike ones before those that differ little.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let whole = Self {
            depth: Depth::AllStages,
            forward_first: false,
            forward_delay: 1.0,
            weight_delay: 0.0,
            halved: Halved::None,
        };
        let wholes = [whole, Self { forward_delay: 0.0, ..whole }].into_iter();
        let rules = whole.with_halves().chain(wholes);
        rules.flat_map(|rule| Depth::CHOICES.map(|depth| Self { depth, ..rule }))
    }

    fn with_halves(self) -> impl Iterator<Item = Self> {
        let first = [false, true].map(|forward_first| Self { forward_first, ..self }).into_iter();
        let delayed = first
            .flat_map(|policy| [0.5, 0.0, 1.0].map(|weight_delay| Self { weight_delay, ..policy }));
        delayed.flat_map(|policy| {
            [Halved::Last, Halved::All, Halved::Ends].map(|halved| Self { halved, ..policy })
        })
    }
}
