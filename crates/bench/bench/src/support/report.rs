//! Report of a bench: tables with spreads, and targets with results; as text, JSON and picture.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use aquifer::say::{say, say_line};
use serde::Serialize;

use super::draw::{self, Bar, BarGroup};
use super::lines;
use super::spread::{Spread, short};
use crate::BenchError;

/// The report of a bench.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name of the bench.
    pub bench: &'static str,
    /// Whether it ran with `--quick`.
    pub quick: bool,
    /// Number of processors of the machine.
    pub processors: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// Notes on the measurement.
    pub notes: Vec<String>,
    /// The tables.
    pub tables: Vec<Table>,
    /// Values over time; if there are any, the picture shows them instead of bars.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Series>,
    /// Targets with their results.
    pub targets: Vec<Target>,
}

/// Values over time.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// Title of the chart. Series with the same title share a chart.
    pub title: String,
    /// Name.
    pub name: String,
    /// Times and values, in the units of the title.
    pub points: Vec<(f64, f64)>,
}

/// A table.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// Title.
    pub title: String,
    /// Names of the printed figures in order. Other figures are in the JSON only.
    #[serde(skip)]
    pub columns: Vec<Column>,
    /// Name of the figure that the picture shows, if any.
    #[serde(skip)]
    pub pictured: Option<&'static str>,
    /// Name of a ratio that the picture shows as text, if the row has it.
    #[serde(skip)]
    pub ratio: Option<&'static str>,
    /// The rows.
    pub rows: Vec<Row>,
}

/// A printed column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    name: &'static str,
    with_spread: bool,
}

impl Column {
    /// A column that is printed with its spread.
    pub fn full(name: &'static str) -> Self {
        Self { name, with_spread: true }
    }

    /// A column that is printed as its median only.
    pub fn middle(name: &'static str) -> Self {
        Self { name, with_spread: false }
    }

    fn show(self, row: &Row) -> String {
        match row.figures.get(self.name) {
            Some(spread) if self.with_spread => spread.to_string(),
            Some(spread) => short(spread.median),
            None => "–".into(),
        }
    }
}

/// A row: one measured configuration, with figures over several rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name.
    pub name: String,
    /// The figures, by name and unit.
    pub figures: BTreeMap<&'static str, Spread>,
}

/// A target, and the measured value.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// Description.
    pub name: String,
    /// The measured value.
    pub value: Spread,
    /// The bound.
    pub bound: f64,
    /// Whether the bound is an upper one.
    pub at_most: bool,
}

impl Target {
    /// Whether the median is within the bound.
    pub fn is_met(&self) -> bool {
        if self.at_most { self.value.median <= self.bound } else { self.value.median >= self.bound }
    }

    fn to_line(&self) -> String {
        let verdict = if self.is_met() { "met   " } else { "MISSED" };
        let bound = if self.at_most { "≤" } else { "≥" };
        format!("  {verdict} {}: {}, target {bound} {}\n", self.name, self.value, short(self.bound))
    }
}

impl Report {
    /// An empty report.
    pub fn new(bench: &'static str, quick: bool) -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            bench,
            quick,
            processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kernel: kernel.trim().to_owned(),
            notes: Vec::new(),
            tables: Vec::new(),
            series: Vec::new(),
            targets: Vec::new(),
        }
    }

    /// The report as text for a terminal.
    pub fn to_text(&self) -> String {
        let quick = if self.quick { ", quick" } else { "" };
        let mut text =
            format!("bench {}{quick}: {} processors, Linux {}\n", self.bench, self.processors, self.kernel);
        for note in &self.notes {
            let _ = writeln!(text, "  {note}");
        }
        for table in &self.tables {
            let _ = writeln!(text, "\n{}", table.title);
            text += &table.to_text();
        }
        text += "\ntargets\n";
        text.extend(self.targets.iter().map(Target::to_line));
        let missed = self.targets.iter().filter(|target| !target.is_met()).count();
        let _ = writeln!(text, "  {missed} of {} targets missed", self.targets.len());
        text
    }

    /// Prints the report, writes it as JSON to a file, and draws its picture into a folder.
    ///
    /// The picture has the name of the bench. `command` is the command that runs benches.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn publish(
        &self,
        command: &str,
        json: Option<&Path>,
        folder: Option<&Path>,
    ) -> Result<(), BenchError> {
        say!("{}", self.to_text());
        if let Some(path) = json {
            let text = serde_json::to_string_pretty(self).expect("numbers and texts can be written");
            std::fs::write(path, text + "\n").map_err(BenchError::io("write", path))?;
            say_line!("report: {}", path.display());
        }
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).map_err(BenchError::io("create folder", folder))?;
            let path = folder.join(format!("{}.svg", self.bench));
            self.draw(command, &path)?;
            say_line!("picture: {}", path.display());
        }
        Ok(())
    }

    /// Draws the picture: a group of bars for each table with a pictured figure, or lines if the
    /// report has series.
    fn draw(&self, command: &str, path: &Path) -> Result<(), BenchError> {
        let title = format!("{command} {}", self.bench);
        if !self.series.is_empty() {
            return lines::draw(path, &title, &self.series);
        }
        let groups: Vec<BarGroup> = self.tables.iter().filter_map(Table::bars).collect();
        draw::bars(path, &title, &groups)
    }
}

impl Table {
    fn to_text(&self) -> String {
        let mut cells = vec![
            std::iter::once(String::new())
                .chain(self.columns.iter().map(|column| column.name.into()))
                .collect(),
        ];
        for row in &self.rows {
            let figures = self.columns.iter().map(|column| column.show(row));
            cells.push(std::iter::once(row.name.clone()).chain(figures).collect());
        }
        draw::table(&cells)
    }

    fn bars(&self) -> Option<BarGroup> {
        let figure = self.pictured?;
        let bars: Vec<Bar> = self
            .rows
            .iter()
            .filter_map(|row| {
                let spread = row.figures.get(figure)?;
                let ratio = self.ratio.and_then(|name| Some((name, row.figures.get(name)?)));
                let ratio =
                    ratio.map_or(String::new(), |(name, ratio)| format!("; {name}: {}", short(ratio.median)));
                Some(Bar { name: row.name.clone(), value: spread.median, text: format!("{spread}{ratio}") })
            })
            .collect();
        (!bars.is_empty()).then(|| BarGroup { title: format!("{}: {figure}", self.title), bars })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(value: f64) -> Report {
        let spread = Spread::of(&[value]).unwrap();
        let mut report = Report::new("faults", true);
        report.tables.push(Table {
            title: "random read".into(),
            columns: vec![Column::full("p50 µs"), Column::middle("p99 µs")],
            pictured: Some("p50 µs"),
            ratio: Some("p50 µs"),
            rows: vec![Row { name: "pool".into(), figures: BTreeMap::from([("p50 µs", spread)]) }],
        });
        report.targets.push(Target { name: "p50".into(), value: spread, bound: 1.5, at_most: true });
        report
    }

    #[test]
    fn a_missed_target_is_printed_as_missed() {
        assert!(report(1.5).to_text().contains("met    p50: 1.50, target ≤ 1.50"));
        let text = report(1.51).to_text();
        assert!(text.contains("MISSED p50: 1.51") && text.contains("1 of 1 targets missed"), "{text}");
        let lower = Target { at_most: false, ..report(1.4).targets[0].clone() };
        assert!(!lower.is_met());
    }

    #[test]
    fn a_figure_that_was_not_measured_is_a_dash() {
        let text = report(2.0).to_text();
        let row = text.lines().find(|line| line.starts_with("pool")).unwrap();
        assert!(row.contains("2.00") && row.ends_with('–'), "{row}");
    }

    #[test]
    fn json_has_spreads_and_targets() {
        let json = serde_json::to_value(report(2.0)).unwrap();
        assert_eq!(json["tables"][0]["rows"][0]["figures"]["p50 µs"]["median"], 2.0);
        assert_eq!(json["targets"][0]["bound"], 1.5);
    }

    #[test]
    fn the_picture_shows_name_and_value() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.svg");
        report(2.0).draw("aquifer bench", &path).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        assert!(
            svg.contains("pool") && svg.contains("2.00; p50 µs: 2.00") && svg.contains("random read"),
            "{svg}"
        );
    }
}
