//! `Palette`: what is meant, as colours out of the sixteen that every terminal has, or without any.

use ratatui::style::{Color, Modifier, Style};

/// What a text means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Strong,
    Quiet,
    Good,
    Warn,
    Bad,
    /// No longer true, perhaps.
    Old,
    Chosen,
    Title,
    Heading,
    Sorted,
    Question,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Palette {
    colours: bool,
}

impl Palette {
    /// As the environment wants it: see <https://no-color.org>.
    pub(crate) fn from_env() -> Palette {
        Palette { colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    #[cfg(test)]
    pub(super) fn with(colours: bool) -> Palette {
        Palette { colours }
    }

    pub(super) fn of(self, tone: Tone) -> Style {
        let (colour, modifier) = match tone {
            Tone::Plain => (None, Modifier::empty()),
            Tone::Strong | Tone::Heading => (None, Modifier::BOLD),
            Tone::Good => (Some(Color::Green), Modifier::empty()),
            Tone::Warn => (Some(Color::Yellow), Modifier::BOLD),
            Tone::Bad => (Some(Color::Red), Modifier::BOLD),
            Tone::Quiet | Tone::Old => (None, Modifier::DIM),
            Tone::Chosen => (None, Modifier::REVERSED),
            Tone::Title => (Some(Color::Cyan), Modifier::BOLD),
            Tone::Sorted => (Some(Color::Cyan), Modifier::BOLD.union(Modifier::UNDERLINED)),
            Tone::Question => (Some(Color::Yellow), Modifier::BOLD.union(Modifier::REVERSED)),
        };
        let style = Style::new().add_modifier(modifier);
        match colour.filter(|_| self.colours) {
            Some(colour) => style.fg(colour),
            None => style,
        }
    }
}
