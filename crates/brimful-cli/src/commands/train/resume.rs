//! What a person is told whose run was interrupted: what is kept, and how to go on.

use std::env;
use std::path::Path;

use super::Trainer;
use crate::shell::quoted;

/// Where the run stopped, and the command that goes on from there.
pub(super) fn story(trainer: &Trainer) -> String {
    let (epochs, steps) = (trainer.epoch, trainer.running.steps);
    let stopped = match steps {
        0 => format!("interrupted after epoch {epochs}"),
        _ => {
            format!("interrupted after step {steps} of {} in epoch {}", trainer.steps(), epochs + 1)
        }
    };
    if let Some(folder) = trainer.options.saved_folder() {
        let shown = folder.display();
        return format!(
            "{stopped}, and its model saved to {shown}: that is a model, not a run, so the next training begins \
             anew with it; --save FILE.safetensors lets a run go on"
        );
    }
    match trainer.options.files.save.as_deref() {
        None => format!("{stopped}; nothing was saved: --save FILE lets the next run go on"),
        Some(file) => {
            let words = env::args_os().map(|word| word.to_string_lossy().into_owned());
            let shown = file.display();
            format!("{stopped} and saved to {shown}; go on with\n  {}", command(words, file))
        }
    }
}

/// The same command, going on from this file.
fn command(mut words: impl Iterator<Item = String>, file: &Path) -> String {
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        if word == "--resume" {
            words.next();
        } else if !word.starts_with("--resume=") {
            kept.push(quoted(&word));
        }
    }
    kept.extend(["--resume".into(), quoted(&file.to_string_lossy())]);
    kept.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_goes_on_from_the_new_file_alone() {
        for (words, expected) in [
            ("brimful|train|--epochs|3", "brimful train --epochs 3 --resume 'b c'"),
            ("brimful|train|--resume|a|--save|b c", "brimful train --save 'b c' --resume 'b c'"),
            ("brimful|train|--resume=a|--save|b c", "brimful train --save 'b c' --resume 'b c'"),
        ] {
            let words = words.split('|').map(str::to_owned);
            assert_eq!(command(words, Path::new("b c")), expected);
        }
    }
}
