//! Renders schedules: a text grid for the terminal, an SVG picture, and a trace for Perfetto.

mod grid;
mod svg;
mod trace;

pub use grid::{Grid, grid, grid_with_transfers};
pub use svg::{Panel, svg};
pub use trace::{measured_trace, trace};
