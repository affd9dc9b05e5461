//! Renders a terminal screen as SVG. Text stays text, and bars become rectangles.

use std::fmt::Write as _;

use vt100::{Cell, Color, Screen};

/// Size of a cell and of the margin, in pixels.
const WIDE: f32 = 8.4;
const HIGH: f32 = 18.0;
const MARGIN: f32 = 14.0;
const BACKGROUND: &str = "#16181d";
const FOREGROUND: &str = "#d5d9e0";

pub(super) fn render(screen: &Screen, title: &str) -> String {
    let (lines, columns) = (screen.size().0.get(), screen.size().1.get());
    let (width, height) =
        (f32::from(columns) * WIDE + 2.0 * MARGIN, f32::from(lines) * HIGH + 2.0 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         width=\"{width:.0}\" \
         height=\"{height:.0}\" role=\"img\" aria-label=\"{title}\">\n\
         <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" rx=\"8\" \
         fill=\"{BACKGROUND}\"/>\n\
         <g font-family=\"ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace\" \
         font-size=\"14\">\n"
    );
    for line in 0..lines {
        let mut column = 0;
        while column < columns {
            column = run(&mut svg, screen, line, column, columns);
        }
    }
    svg.push_str("</g>\n</svg>\n");
    svg
}

/// Draws the cells from `start` that have the same style, and returns where they end.
fn run(svg: &mut String, screen: &Screen, line: u16, start: u16, columns: u16) -> u16 {
    let Some(first) = screen.cell(line, start) else { return start + 1 };
    let (mut end, mut text) = (start, String::new());
    while let Some(cell) = screen.cell(line, end).filter(|cell| end < columns && alike(cell, first))
    {
        if !cell.is_wide_continuation() {
            text.push_str(if cell.has_contents() { cell.contents() } else { " " });
        }
        end += 1;
    }
    let (x, y) = (MARGIN + f32::from(start) * WIDE, MARGIN + f32::from(line) * HIGH);
    let width = f32::from(end - start) * WIDE;
    let (mut ink, mut paper) =
        (colour(first.fgcolor(), FOREGROUND), colour(first.bgcolor(), BACKGROUND));
    if first.inverse() {
        std::mem::swap(&mut ink, &mut paper);
    }
    if paper != BACKGROUND {
        // Half a pixel wider, so that no gap is visible between cells.
        let width = width + 0.5;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{HIGH}\" \
             fill=\"{paper}\"/>"
        );
    }
    if let Some(part) = bar(&text) {
        let (width, y, high) = (part * WIDE, y + 4.0, HIGH - 8.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{high}\" \
             fill=\"{ink}\"/>"
        );
    } else {
        let weight = if first.bold() { " font-weight=\"bold\"" } else { "" };
        let dim = if first.dim() { " opacity=\"0.6\"" } else { "" };
        let under = if first.underline() { " text-decoration=\"underline\"" } else { "" };
        for (at, words) in pieces(&text) {
            let (x, y, length) =
                (x + at as f32 * WIDE, y + 13.0, words.chars().count() as f32 * WIDE);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" textLength=\"{length:.1}\" \
                 fill=\"{ink}\"{weight}{dim}{under}>{}</text>",
                escaped(words)
            );
        }
    }
    end
}

/// The pieces of a text between multiple spaces, which viewers would collapse, with the cell at
/// which each begins.
fn pieces(text: &str) -> Vec<(usize, &str)> {
    let (mut pieces, mut at) = (Vec::new(), 0);
    for piece in text.split("  ") {
        let shown = piece.trim_start_matches(' ');
        if !shown.is_empty() {
            pieces.push((
                at + piece.chars().count() - shown.chars().count(),
                shown.trim_end_matches(' '),
            ));
        }
        at += piece.chars().count() + 2;
    }
    pieces
}

/// Whether two cells have the same style, and are both text or both part of a bar.
fn alike(a: &Cell, b: &Cell) -> bool {
    let looks = |cell: &Cell| {
        let style = [cell.bold(), cell.dim(), cell.underline(), cell.inverse()];
        (cell.fgcolor(), cell.bgcolor(), style, bar(cell.contents()).is_some())
    };
    looks(a) == looks(b)
}

/// The number of cells that a bar fills; `None` for other text.
fn bar(text: &str) -> Option<f32> {
    let eighths = |letter: char| "▏▎▍▌▋▊▉█".chars().position(|block| block == letter);
    let parts: Option<Vec<f32>> =
        text.chars().map(|letter| Some((eighths(letter)? + 1) as f32 / 8.0)).collect();
    parts.filter(|parts| !parts.is_empty()).map(|parts| parts.iter().sum())
}

fn colour(colour: Color, otherwise: &'static str) -> &'static str {
    const SIXTEEN: [&str; 16] = [
        "#16181d", "#e5534b", "#57ab5a", "#d9a53a", "#539bf5", "#b083f0", "#39c5cf", "#adbac7",
        "#636e7b", "#ff938a", "#6bc46d", "#f0c862", "#6cb6ff", "#dcbdfb", "#56d4dd", "#ffffff",
    ];
    match colour {
        Color::Idx(index) => SIXTEEN.get(usize::from(index)).copied().unwrap_or(otherwise),
        _ => otherwise,
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
