//! `brimful report`: makes a page from a run file. The page is a single file with its data, styles and scripts,
//! which any browser opens.

use std::path::{Path, PathBuf};

use anyhow::Result;
use brimful::save;
use brimful_report::Run;
use clap::Args;

use crate::exit::Exit;
use crate::files::{self, FlagFile};
use crate::output;

/// Options of `brimful report`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful train --record run.json               record a run
  brimful report run.json -o report.html        make its page
  brimful train --report report.html            both at once
  brimful plan -s 4 -m 8 --report plan.html     a page of simulated steps")]
pub struct ReportOptions {
    /// Run file, as written by train --record
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Output file: a page that any browser opens
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

impl ReportOptions {
    /// Lists the files that the command reads and writes.
    pub(crate) fn files(&self) -> Vec<FlagFile> {
        let files = [files::read("RUN", Some(&self.run)), files::written("-o", Some(&self.output))];
        files.into_iter().flatten().collect()
    }
}

/// Reads and checks the run, and writes its page.
pub(crate) fn run(options: &ReportOptions) -> Result<Exit> {
    write_page(&options.output, &Run::read(&options.run)?)?;
    output::line(&format!("wrote {}", options.output.display()))?;
    Ok(Exit::Done)
}

const PAGE: &str = include_str!("../../page/page.html");
/// Style sheets. Rules for narrow screens come last, so that they take precedence.
const STYLES: [&str; 6] = [
    include_str!("../../page/base.css"),
    include_str!("../../page/cards.css"),
    include_str!("../../page/timeline.css"),
    include_str!("../../page/tables.css"),
    include_str!("../../page/charts.css"),
    include_str!("../../page/narrow.css"),
];
/// Scripts, in the order of their dependencies.
const SCRIPTS: [&str; 8] = [
    include_str!("../../page/format.js"),
    include_str!("../../page/steps.js"),
    include_str!("../../page/lanes.js"),
    include_str!("../../page/timeline.js"),
    include_str!("../../page/gestures.js"),
    include_str!("../../page/charts.js"),
    include_str!("../../page/sections.js"),
    include_str!("../../page/main.js"),
];

/// Writes the page atomically.
pub(crate) fn write_page(path: &Path, run: &Run) -> Result<()> {
    Ok(save::replace(path, render(run).as_bytes())?)
}

/// Fills the page's placeholders in one pass, so that a placeholder in the inserted text is not filled.
fn render(run: &Run) -> String {
    let (styles, scripts) = (STYLES.concat(), SCRIPTS.concat());
    let (title, data) = (escape_text(&run.title), escape_script(&run.to_json()));
    let mut page = String::with_capacity(PAGE.len() + styles.len() + scripts.len() + data.len());
    for part in PAGE.split("{{") {
        let (place, rest) = part.split_once("}}").unwrap_or(("", part));
        page.push_str(match place {
            "style" => &styles,
            "script" => &scripts,
            "title" => &title,
            "run" => &data,
            _ => "",
        });
        page.push_str(rest);
    }
    page
}

fn escape_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Escapes JSON so that no text in the JSON ends the script element or a line of the script.
fn escape_script(json: &str) -> String {
    json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

#[cfg(test)]
mod tests {
    use brimful::schedule::ActionKind;
    use brimful_plan::schedule::{Awaited, TransferKind};

    use super::*;

    #[test]
    fn the_page_knows_every_letter_of_a_timeline() {
        let actions = ActionKind::ALL.map(ActionKind::letter).to_vec();
        let transfers = TransferKind::ALL.map(TransferKind::letter).to_vec();
        let letters = [actions, transfers, Awaited::ALL.map(Awaited::letter).to_vec()].concat();
        // A release takes no time, so it is not recorded.
        for letter in letters.iter().filter(|letter| **letter != TransferKind::Release.letter()) {
            let entry = format!("{{ letter: \"{letter}\",");
            assert!(SCRIPTS.concat().contains(&entry), "{letter}");
        }
    }

    #[test]
    fn no_name_can_leave_its_place() {
        let mut run = Run::new("</title><script>alert(1)</script>{{run}}");
        let value = "</script><!-- \u{2028}\u{2029} {{script}}";
        run.settings.push(("data".into(), value.into()));
        let page = render(&run);
        assert_eq!(page.matches("</script").count(), PAGE.matches("</script").count());
        assert!(!page.contains("<script>alert") && !page.contains(['\u{2028}', '\u{2029}']));
        let start = page.find(r#"{"format""#).expect("the data");
        let data = page[start..].lines().next().expect("one line");
        let data = data.trim_end_matches("</script>");
        let back: serde_json::Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(back["settings"][0][1], value);
    }
}
