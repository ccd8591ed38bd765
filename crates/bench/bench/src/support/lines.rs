//! Line charts, as SVG.

use std::path::Path;

use plotters::prelude::*;

use super::draw::picture;
use super::report::Series;
use crate::BenchError;

const WIDTH_PX: i32 = 890;
const TITLE_PX: i32 = 34;
const CHART_PX: i32 = 380;
/// Most charts in a row.
const COLUMNS_MAX: usize = 2;
/// Colours of the series.
const COLOURS: [RGBColor; 10] = [
    RGBColor(150, 160, 170),
    RGBColor(90, 95, 105),
    RGBColor(20, 110, 180),
    RGBColor(120, 190, 235),
    RGBColor(200, 80, 60),
    RGBColor(235, 160, 70),
    RGBColor(140, 90, 160),
    RGBColor(70, 150, 90),
    RGBColor(180, 200, 60),
    RGBColor(0, 0, 0),
];

/// Draws series into charts, one for each title, whose value axes start at 0.
///
/// # Errors
/// If the file cannot be written.
pub fn draw(path: &Path, title: &str, series: &[Series]) -> Result<(), BenchError> {
    let mut charts: Vec<Vec<&Series>> = Vec::new();
    for line in series {
        match charts.iter_mut().find(|chart| chart[0].title == line.title) {
            Some(chart) => chart.push(line),
            None => charts.push(vec![line]),
        }
    }
    let columns = charts.len().min(COLUMNS_MAX);
    if columns == 0 {
        return Ok(());
    }
    let rows = charts.len().div_ceil(columns);
    let height = TITLE_PX + CHART_PX * i32::try_from(rows).expect("a few charts");
    picture(path, WIDTH_PX, height, |area| {
        area.draw(&Text::new(title.to_owned(), (12, 10), ("sans-serif", 19).into_font()))?;
        let (_, below) = area.split_vertically(TITLE_PX);
        let places = below.split_evenly((rows, columns));
        places.iter().zip(&charts).try_for_each(|(place, chart)| draw_chart(place, chart))
    })
}

fn draw_chart<D: DrawingBackend>(
    area: &DrawingArea<D, plotters::coord::Shift>,
    series: &[&Series],
) -> Result<(), DrawingAreaErrorKind<D::ErrorType>> {
    let points = || series.iter().flat_map(|series| &series.points);
    let begin = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let end = points().map(|point| point.0).fold(begin, f64::max);
    let most = points().map(|point| point.1).fold(1.0, f64::max) * 1.25;
    let mut chart = ChartBuilder::on(area)
        .caption(&series[0].title, ("sans-serif", 13))
        .margin(8)
        .x_label_area_size(24)
        .y_label_area_size(40)
        .build_cartesian_2d(begin..end, 0.0..most)?;
    chart.configure_mesh().light_line_style(WHITE).draw()?;
    for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let line = LineSeries::new(series.points.iter().copied(), colour.stroke_width(2));
        let mark = *colour;
        chart
            .draw_series(line)?
            .label(&series.name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], mark.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.2))
        .draw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_has_all_series_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.svg");
        let one = |name: &str| Series {
            title: "% over hours".into(),
            name: name.into(),
            points: vec![(1.0, 40.0), (2.0, 41.5)],
        };
        draw(&path, "aquifer bench x", &[one("static"), one("pool")]).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        assert!(["aquifer bench x", "% over hours", "static", "pool"].iter().all(|word| svg.contains(word)));
    }
}
