//! A run as one page: its data, and the styles and scripts that show it, in a single file.

use std::path::Path;

use anyhow::Result;
use brimful::report::Run;
use brimful::save;

const PAGE: &str = include_str!("../page/page.html");
/// What is narrower comes last, where it rules.
const STYLES: [&str; 6] = [
    include_str!("../page/base.css"),
    include_str!("../page/cards.css"),
    include_str!("../page/timeline.css"),
    include_str!("../page/tables.css"),
    include_str!("../page/charts.css"),
    include_str!("../page/narrow.css"),
];
/// In the order in which they need each other.
const SCRIPTS: [&str; 8] = [
    include_str!("../page/format.js"),
    include_str!("../page/steps.js"),
    include_str!("../page/lanes.js"),
    include_str!("../page/timeline.js"),
    include_str!("../page/gestures.js"),
    include_str!("../page/charts.js"),
    include_str!("../page/sections.js"),
    include_str!("../page/main.js"),
];

/// Writes the page, whole or not at all.
pub(crate) fn write(path: &Path, run: &Run) -> Result<()> {
    Ok(save::replace(path, render(run).as_bytes())?)
}

/// Fills the page's places. What is filled in is not looked through for more of them.
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

/// The same JSON, with nothing in it that could end a script element or a line of one.
fn escape_script(json: &str) -> String {
    json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

#[cfg(test)]
mod tests {
    use super::*;

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
