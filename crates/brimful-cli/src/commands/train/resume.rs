//! Message after an interruption: what is saved, and how to resume.

use std::env;
use std::path::Path;

use super::Trainer;
use crate::shell::quoted;

/// Says where the run stopped, and gives the command that resumes it.
pub(super) fn story(trainer: &Trainer) -> String {
    let (epochs, steps) = (trainer.epoch, trainer.running.steps);
    let stopped = match steps {
        0 => format!("interrupted after epoch {epochs}"),
        _ => {
            format!("interrupted after step {steps} of {} in epoch {}", trainer.steps(), epochs + 1)
        }
    };
    let Some(place) = trainer.options.files.save.as_deref() else {
        return format!("{stopped}; nothing was saved: give --save FILE to resume");
    };
    let shown = place.display();
    if trainer.is_over() {
        return format!("{stopped} and saved to {shown}; the training is complete");
    }
    let program = env::args().next().unwrap_or_else(|| "brimful".to_owned());
    let command = command(&program, trainer.world.size(), place);
    format!("{stopped} and saved to {shown}; resume with\n  {command}")
}

/// Returns the command that resumes a saved run over `ranks` ranks; the saved run has its own flags.
fn command(program: &str, ranks: usize, place: &Path) -> String {
    let launcher = if ranks > 1 { format!("mpirun -n {ranks} ") } else { String::new() };
    let place = quoted(&place.to_string_lossy());
    format!("{launcher}{} train --resume {place}", quoted(program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_goes_on_from_the_saved_place() {
        let place = Path::new("b c");
        assert_eq!(command("brimful", 1, place), "brimful train --resume 'b c'");
        assert_eq!(command("brimful", 4, place), "mpirun -n 4 brimful train --resume 'b c'");
    }
}
