//! Results of the demo: a table, bars in the terminal, and an SVG.

use std::fmt::Write;
use std::path::Path;

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::draw::{self, Area, DrawResult, pixels};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::runs::Played;

const BAR_CHARS: u32 = 48;
const WIDTH_PX: i32 = 820;
const BARS_TOP_PX: i32 = 50;
const ROW_PX: i32 = 30;
const NAME_PX: i32 = 110;
const PANEL_PX: i32 = 280;
const CURVE_PX: i32 = 260;
/// Colour of each run.
const COLOURS: [RGBColor; 3] = [RGBColor(120, 130, 140), RGBColor(20, 110, 180), RGBColor(205, 110, 40)];

/// Table of the results.
pub fn table(played: &[Played]) -> String {
    let head = ["", "time s", "÷ plain", "resident peak", "with mempool", "elsewhere", "faults"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for run in played {
        rows.push(vec![
            run.name.into(),
            run.failure.as_ref().map_or_else(|| format!("{:.1}", run.seconds), |_| "–".into()),
            run.failure
                .as_ref()
                .map_or_else(|| format!("{:.2}", run.seconds / played[0].seconds), |_| "–".into()),
            bytes_or_dash(run.resident_peak_bytes),
            bytes_or_dash(run.local_peak_bytes),
            bytes_or_dash(run.elsewhere_peak_bytes),
            run.faults.map_or("–".into(), |faults| faults.to_string()),
        ]);
    }
    let mut text = draw::table(&rows);
    for run in played.iter().filter(|run| run.failure.is_some()) {
        let _ = writeln!(text, "{}: {}", run.name, run.time());
    }
    text
}

/// Bytes as text; a dash for a run that failed before it started.
fn bytes_or_dash(bytes: u64) -> String {
    if bytes == 0 { "–".into() } else { show_bytes(bytes) }
}

/// The time of a run, or the start of its failure, for the picture.
fn short_time(run: &Played) -> String {
    const CHARS_MAX: usize = 40;
    let time = run.time();
    if time.chars().count() <= CHARS_MAX {
        return time;
    }
    let cut: String = time.chars().take(CHARS_MAX - 1).collect();
    format!("{cut}…")
}

/// Length of the time's bar: 0 if the run failed.
fn bar_seconds(run: &Played) -> f64 {
    if run.failure.is_some() { 0.0 } else { run.seconds }
}

/// Bars as text for a terminal.
pub fn text(played: &[Played], limit_bytes: u64) -> String {
    let mut text = String::new();
    let slowest = played.iter().map(bar_seconds).fold(0.0, f64::max);
    let largest = played.iter().map(|run| run.resident_peak_bytes).max().unwrap_or(0);
    text += "time\n";
    for run in played {
        let bar = draw::text_bar(bar_seconds(run), slowest, BAR_CHARS);
        let _ = writeln!(text, "  {:<12} {bar} {}", run.name, run.time());
    }
    let _ = writeln!(text, "memory resident at the peak (limit {})", show_bytes(limit_bytes));
    for run in played {
        let bar = draw::text_bar(float(run.resident_peak_bytes), float(largest), BAR_CHARS);
        let _ = writeln!(text, "  {:<12} {bar} {}", run.name, show_bytes(run.resident_peak_bytes));
    }
    text
}

/// Draws bars of time and memory, and a chart of memory over time.
///
/// # Errors
/// If the file cannot be written.
pub fn draw(path: &Path, played: &[Played], limit_bytes: u64, title: &str) -> Result<(), BenchError> {
    let rows = i32::try_from(played.len()).unwrap_or(i32::MAX);
    let curve_top = BARS_TOP_PX + ROW_PX * (rows + 1) + 20;
    draw::picture(path, WIDTH_PX, curve_top + CURVE_PX, |area| {
        area.draw(&Text::new(title.to_owned(), (12, 14), ("sans-serif", 18).into_font()))?;
        let times: Vec<_> = played.iter().map(|run| (bar_seconds(run), short_time(run))).collect();
        let resident: Vec<_> = played
            .iter()
            .map(|run| (float(run.resident_peak_bytes), show_bytes(run.resident_peak_bytes)))
            .collect();
        names(area, played)?;
        panel(area, NAME_PX, "time", &times)?;
        panel(area, NAME_PX + PANEL_PX + 70, "memory resident at the peak", &resident)?;
        let (_, below) = area.split_vertically(curve_top);
        curves(&below, played, limit_bytes)
    })
}

fn names<'a>(area: &Area<'a>, played: &[Played]) -> DrawResult<'a, ()> {
    let mut top = BARS_TOP_PX + ROW_PX;
    for run in played {
        area.draw(&Text::new(run.name.to_owned(), (14, top + 6), ("sans-serif", 14).into_font()))?;
        top += ROW_PX;
    }
    Ok(())
}

fn panel<'a>(area: &Area<'a>, left: i32, title: &str, bars: &[(f64, String)]) -> DrawResult<'a, ()> {
    let mut top = BARS_TOP_PX;
    area.draw(&Text::new(title.to_owned(), (left, top + 8), ("sans-serif", 14).into_font()))?;
    let greatest = bars.iter().map(|bar| bar.0).fold(f64::MIN_POSITIVE, f64::max);
    for ((value, text), colour) in bars.iter().zip(COLOURS) {
        top += ROW_PX;
        let end = left + pixels(value / greatest * f64::from(PANEL_PX - 70)).max(1);
        area.draw(&Rectangle::new([(left, top + 3), (end, top + ROW_PX - 5)], colour.filled()))?;
        area.draw(&Text::new(text.clone(), (end + 6, top + 6), ("sans-serif", 13).into_font()))?;
    }
    Ok(())
}

fn curves<'a>(
    area: &DrawingArea<SVGBackend<'a>, Shift>,
    played: &[Played],
    limit_bytes: u64,
) -> DrawResult<'a, ()> {
    let mib = |bytes: u64| float(bytes) / float(MIB);
    let end_s = played.iter().map(|run| run.seconds).fold(1.0, f64::max);
    let top = played.iter().map(|run| mib(run.resident_peak_bytes)).fold(1.0, f64::max) * 1.05;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..end_s, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("seconds")
        .y_desc("MiB resident")
        .x_label_formatter(&|seconds| format!("{seconds:.0}"))
        .y_label_formatter(&|mib| format!("{mib:.0}"))
        .draw()?;
    let limit = mib(limit_bytes);
    chart.draw_series(LineSeries::new(
        [(0.0, limit), (end_s, limit)],
        RGBColor(200, 40, 40).stroke_width(1),
    ))?;
    let label = format!("limit {}", show_bytes(limit_bytes));
    let style = ("sans-serif", 13).into_font();
    chart.draw_series([Text::new(label, (end_s * 0.88, limit + top * 0.08), style)])?;
    for (run, colour) in played.iter().zip(COLOURS) {
        let points = run.curve.iter().map(|point| (point.elapsed_s, mib(point.resident_bytes)));
        chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::runs::Point;
    use super::*;

    fn played() -> Vec<Played> {
        let curve = vec![
            Point { elapsed_s: 0.0, resident_bytes: MIB },
            Point { elapsed_s: 5.0, resident_bytes: 400 * MIB },
        ];
        let plain = Played {
            name: "plainly",
            seconds: 10.0,
            resident_peak_bytes: 400 * MIB,
            local_peak_bytes: 400 * MIB,
            curve,
            ..Played::default()
        };
        let pool = Played {
            name: "on the pool",
            seconds: 15.0,
            resident_peak_bytes: 100 * MIB,
            elsewhere_peak_bytes: 310 * MIB,
            faults: Some(12_345),
            ..plain.clone()
        };
        vec![plain, pool]
    }

    #[test]
    fn a_peer_that_was_killed_is_a_row() {
        let mut played = played();
        let failure = Some("killed by the kernel for lack of memory".to_owned());
        played.push(Played { name: "on swap", failure, seconds: 7.0, ..played[1].clone() });
        let (table, bars) = (table(&played), text(&played, 100 * MIB));
        let why = "killed by the kernel for lack of memory, after 7.0 s";
        assert!(table.contains("on swap: ") && table.contains(why) && bars.contains(why), "{table}{bars}");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demo.svg");
        draw(&path, &played, 100 * MIB, "a title").unwrap();
        assert!(std::fs::read_to_string(path).unwrap().contains("killed by the kernel for lack of"));
    }

    #[test]
    fn the_table_has_ratios_and_faults() {
        let text = table(&played());
        let pool = text.lines().last().unwrap();
        for part in ["15.0", "1.50", "100 MiB", "310 MiB", "12345"] {
            assert!(pool.contains(part), "{pool}");
        }
        assert!(text.lines().nth(1).unwrap().ends_with('–'));
    }

    #[test]
    fn bars_are_in_proportion_to_the_greatest() {
        let text = text(&played(), 100 * MIB);
        let lengths: Vec<usize> = text.lines().map(|line| line.matches('█').count()).collect();
        assert_eq!(lengths, [0, 32, 48, 0, 48, 12]);
    }

    #[test]
    fn the_picture_names_all_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demo.svg");
        draw(&path, &played(), 100 * MIB, "a title").unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        for part in ["a title", "plainly", "on the pool", "15.0 s", "100 MiB", "MiB resident"] {
            assert!(svg.contains(part), "{part} is not in the picture");
        }
    }
}
