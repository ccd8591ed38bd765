//! Tables and bar charts, for terminals and as SVG.

use std::fmt::Write;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::BenchError;

/// A group of rows of a picture with a title.
#[derive(Clone, Debug)]
pub struct BarGroup {
    /// The title.
    pub title: String,
    /// The rows.
    pub bars: Vec<Bar>,
}

/// One row of a picture.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Label of the row.
    pub name: String,
    /// Length of the bar, relative to others of its group.
    pub value: f64,
    /// Text beside the bar.
    pub text: String,
}

/// A drawing area.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const ROW_PX: i32 = 24;
const TITLE_PX: i32 = 34;
const NAME_PX: i32 = 250;
const BAR_PX: i32 = 360;
const TEXT_PX: i32 = 280;
/// Colours of Aquifer's bars and of the others.
const COLOURS: [RGBColor; 2] = [RGBColor(20, 110, 180), RGBColor(150, 160, 170)];

/// A text table with padded columns. The first row is the head, and the first column is
/// left-aligned.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            let _ =
                if column == 0 { write!(line, "{cell:<width$}") } else { write!(line, "  {cell:>width$}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// A bar of at most `width` characters for a terminal, in eighths of a character.
pub fn text_bar(value: f64, greatest: f64, width: u32) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let share = if greatest > 0.0 { (value / greatest).clamp(0.0, 1.0) } else { 0.0 };
    let eighths = pixels(share * f64::from(width * 8));
    let eighths = usize::try_from(eighths).unwrap_or(0);
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8]);
    }
    bar
}

/// Draws groups of bars below each other. Bars named `pool…` get Aquifer's colour.
///
/// # Errors
/// If the file cannot be written.
pub fn bars(path: &Path, title: &str, groups: &[BarGroup]) -> Result<(), BenchError> {
    let rows = groups.iter().map(|group| TITLE_PX + ROW_PX * length(group.bars.len()));
    let height = 2 * TITLE_PX + rows.sum::<i32>();
    picture(path, NAME_PX + BAR_PX + TEXT_PX, height, |area| {
        area.draw(&Text::new(title.to_owned(), (12, 10), ("sans-serif", 19).into_font()))?;
        let mut top = TITLE_PX + 8;
        for group in groups {
            top = bar_group(area, group, top)?;
        }
        Ok(())
    })
}

fn bar_group<'a>(area: &Area<'a>, group: &BarGroup, mut top: i32) -> DrawResult<'a, i32> {
    area.draw(&Text::new(group.title.clone(), (12, top + 10), ("sans-serif", 15).into_font()))?;
    top += TITLE_PX;
    let greatest = group.bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    for bar in &group.bars {
        let colour = COLOURS[usize::from(!bar.name.starts_with("pool"))];
        let share = if greatest > 0.0 { bar.value / greatest } else { 0.0 };
        let end = NAME_PX + pixels(share * f64::from(BAR_PX)).max(1);
        area.draw(&Text::new(bar.name.clone(), (24, top + 4), ("sans-serif", 13).into_font()))?;
        area.draw(&Rectangle::new([(NAME_PX, top + 3), (end, top + ROW_PX - 5)], colour.filled()))?;
        area.draw(&Text::new(bar.text.clone(), (end + 8, top + 4), ("sans-serif", 13).into_font()))?;
        top += ROW_PX;
    }
    Ok(top)
}

/// Result of drawing.
pub type DrawResult<'a, T> = Result<T, DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

/// Writes an SVG of the given size; `content` draws on its white background.
///
/// # Errors
/// If the file cannot be written.
pub fn picture(
    path: &Path,
    width: i32,
    height: i32,
    content: impl FnOnce(&Area<'_>) -> DrawResult<'static, ()>,
) -> Result<(), BenchError> {
    let mut svg = String::new();
    let size = (width.unsigned_abs(), height.unsigned_abs());
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE).and_then(|()| content(&area)).and_then(|()| area.present())
    };
    drawn.map_err(|error| BenchError::Picture { path: path.to_owned(), reason: error.to_string() })?;
    std::fs::write(path, svg).map_err(BenchError::io("write", path))
}

/// A coordinate rounded to a whole pixel.
#[expect(clippy::cast_possible_truncation, reason = "clamped to what an i32 holds")]
pub fn pixels(value: f64) -> i32 {
    value.round().clamp(0.0, 100_000.0) as i32
}

fn length(items: usize) -> i32 {
    i32::try_from(items).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["", "µs"], vec!["pool", "1.5"], vec!["swap file", "10"]];
        let rows = rows.map(|row| row.into_iter().map(String::from).collect());
        assert_eq!(table(&rows), "            µs\npool       1.5\nswap file   10\n");
        assert_eq!(table(&[]), "");
    }

    #[test]
    fn bars_are_in_proportion() {
        assert_eq!(text_bar(2.0, 4.0, 8), "████");
        assert_eq!(text_bar(4.0, 4.0, 8), "████████");
        assert_eq!(text_bar(9.0, 4.0, 8), "████████");
        assert_eq!(text_bar(0.3, 4.0, 8), "▋");
        assert_eq!(text_bar(1.0, 0.0, 8), "");
        assert_eq!(text_bar(f64::NAN, 4.0, 8), "");
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = bars(Path::new("/nowhere/x.svg"), "x", &[]).unwrap_err().to_string();
        assert!(error.contains("/nowhere/x.svg"), "{error}");
    }
}
