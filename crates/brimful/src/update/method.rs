//! Choice of an optimization method.

use brimful_torch::optim::{self as fused, fits};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::{Adafactor, Adam, AdamW, Muon, Sgd, StateFormat};
use crate::Result;

/// Optimization method: [`Sgd`], [`Adam`], [`AdamW`], [`Adafactor`] or [`Muon`], with its options.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Method {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Adam.
    Adam(Adam),
    /// Adam with decoupled weight decay.
    #[serde(rename = "adamw")]
    AdamW(AdamW),
    /// Adafactor: averages of squares by rows and columns.
    Adafactor(Adafactor),
    /// Muon: orthogonalized momentum of matrices.
    Muon(Muon),
}

/// Moment of a method: its name and its shape.
pub(super) type Slot = (&'static str, Extent);

/// Shape of a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// Shape of the parameter.
    Whole,
    /// One number for each row of the last two dimensions.
    Rows,
    /// One number for each column of the last two dimensions.
    Columns,
}

impl Extent {
    /// Returns the moment's shape for a parameter of this shape; `None` if both are the same.
    pub(super) fn shape(self, parameter: &[i64]) -> Option<Vec<i64>> {
        let one = match self {
            Self::Whole => return None,
            Self::Rows => 1,
            Self::Columns => 2,
        };
        let mut shape = parameter.to_vec();
        shape[parameter.len() - one] = 1;
        Some(shape)
    }
}

/// Evaluates an expression on the configuration of any method.
macro_rules! of_method {
    ($method:expr, $config:ident => $value:expr) => {
        match $method {
            Method::Sgd($config) => $value,
            Method::Adam($config) => $value,
            Method::AdamW($config) => $value,
            Method::Adafactor($config) => $value,
            Method::Muon($config) => $value,
        }
    };
}

impl Method {
    /// Returns `sgd`, `adam`, `adamw`, `adafactor` or `muon`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sgd(_) => "sgd",
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
            Self::Adafactor(_) => "adafactor",
            Self::Muon(_) => "muon",
        }
    }

    /// Returns the learning rate.
    pub fn learning_rate(&self) -> f64 {
        of_method!(self, config => config.learning_rate)
    }

    pub(super) fn set_learning_rate(&mut self, rate: f64) {
        of_method!(self, config => config.learning_rate = rate)
    }

    /// Returns this method without weight decay.
    pub(crate) fn without_decay(self) -> Self {
        of_method!(self, config => config.weight_decay(0.0).into())
    }

    pub(super) fn check(&self) -> Result<()> {
        of_method!(self, config => config.check())
    }

    /// Returns the method of a parameter of this many dimensions.
    pub(super) fn of(self, dimensions: usize) -> Self {
        match self {
            Self::Muon(muon) if dimensions != 2 => muon.of_others().into(),
            other => other,
        }
    }

    /// Returns the moments that are kept for a parameter of this many dimensions.
    pub(super) fn moments(&self, dimensions: usize) -> &'static [Slot] {
        const ADAM: &[Slot] = &[
            ("exp_avg", Extent::Whole),
            ("exp_avg_sq", Extent::Whole),
            ("max_exp_avg_sq", Extent::Whole),
        ];
        const BUFFER: &[Slot] = &[("momentum_buffer", Extent::Whole)];
        match self.of(dimensions) {
            Self::Sgd(config) => &BUFFER[..config.has_momentum().into()],
            Self::Adam(config) => &ADAM[..config.moments()],
            Self::AdamW(config) => &ADAM[..config.moments()],
            Self::Adafactor(_) if dimensions > 1 => {
                &[("row_var", Extent::Rows), ("col_var", Extent::Columns)]
            }
            Self::Adafactor(_) => &[("variance", Extent::Whole)],
            Self::Muon(_) => BUFFER,
        }
    }

    /// Returns whether the method counts the steps of each parameter.
    pub(super) fn counts(&self) -> bool {
        !matches!(self, Self::Sgd(_) | Self::Muon(_))
    }

    /// Returns whether an update needs the whole parameter at once, contiguous in memory.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Self::Adafactor(_) | Self::Muon(_))
    }

    /// Returns whether the parameter can be updated in its own memory, not in a copy.
    pub(super) fn updates_in_place(&self, tensor: &Tensor) -> bool {
        fits(tensor, tensor) && (tensor.is_contiguous() || !self.is_whole())
    }

    /// Returns the format of the moments.
    pub(super) fn format(&self) -> StateFormat {
        match self {
            Self::Sgd(config) => config.state_format,
            Self::Adam(config) => config.state_format,
            Self::AdamW(config) => config.state_format,
            Self::Adafactor(_) => Adafactor::state_format(),
            Self::Muon(config) => config.state_format,
        }
    }

    /// Returns the settings of an update.
    pub(super) fn options(&self) -> fused::Options {
        of_method!(self, config => config.options())
    }

    /// Returns the dtype and the number of elements of the scratch memory that an update of this tensor needs on this
    /// device.
    pub(super) fn scratch(&self, work: &Tensor, device: Device) -> Option<(Kind, usize)> {
        match self {
            Self::Adafactor(_) => Some(Adafactor::scratch(work)),
            Self::Muon(_) => Some(Muon::scratch(work, device)),
            _ => None,
        }
    }

    /// Updates parameters of one device and dtype. If `rate` is given, it replaces the method's learning rate.
    /// `scratch` holds the memory that [`Method::scratch`] asks for.
    pub(super) fn update(
        &self,
        all: &[fused::Update<'_>],
        scratch: &[Tensor],
        rate: Option<&Tensor>,
    ) -> Result<()> {
        let mut options = self.options();
        if rate.is_some() {
            options.rate = 1.0;
        }
        let scratch = |one: &fused::Update<'_>| {
            let device = one.parameter.device();
            let kind = self.scratch(one.parameter, device).map(|(kind, _)| kind);
            let place = (kind, device);
            let found = scratch.iter().find(|space| (Some(space.kind()), space.device()) == place);
            found.expect("there is scratch space for every whole update")
        };
        let mut each = all.iter();
        match self {
            Self::Adafactor(config) => {
                each.try_for_each(|one| config.update(one, &options, scratch(one), rate))
            }
            Self::Muon(config) => {
                each.try_for_each(|one| config.update(one, options, scratch(one), rate))
            }
            _ => Ok(fused::update(all, &options, rate)?),
        }
    }
}

impl From<Sgd> for Method {
    fn from(config: Sgd) -> Self {
        Self::Sgd(config)
    }
}

impl From<Adam> for Method {
    fn from(config: Adam) -> Self {
        Self::Adam(config)
    }
}

impl From<AdamW> for Method {
    fn from(config: AdamW) -> Self {
        Self::AdamW(config)
    }
}

impl From<Adafactor> for Method {
    fn from(config: Adafactor) -> Self {
        Self::Adafactor(config)
    }
}

impl From<Muon> for Method {
    fn from(config: Muon) -> Self {
        Self::Muon(config)
    }
}
