//! `Palette`: maps meanings to the sixteen colours that every terminal has, or to no colours.

use ratatui::style::{Color, Modifier, Style};

/// The meaning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Strong,
    Quiet,
    Good,
    Warn,
    Bad,
    /// Shown during an outage.
    Outdated,
    Selected,
    Title,
    Heading,
    Sorted,
    Confirmation,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Palette {
    colours: bool,
}

impl Palette {
    /// Without colours if `NO_COLOR` is set: see <https://no-color.org>.
    pub(crate) fn from_env() -> Palette {
        Palette { colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    #[cfg(test)]
    pub(super) fn with(colours: bool) -> Palette {
        Palette { colours }
    }

    pub(super) fn style(self, tone: Tone) -> Style {
        let (colour, modifier) = match tone {
            Tone::Plain => (None, Modifier::empty()),
            Tone::Strong | Tone::Heading => (None, Modifier::BOLD),
            Tone::Good => (Some(Color::Green), Modifier::empty()),
            Tone::Warn => (Some(Color::Yellow), Modifier::BOLD),
            Tone::Bad => (Some(Color::Red), Modifier::BOLD),
            Tone::Quiet | Tone::Outdated => (None, Modifier::DIM),
            Tone::Selected => (None, Modifier::REVERSED),
            Tone::Title => (Some(Color::Cyan), Modifier::BOLD),
            Tone::Sorted => (Some(Color::Cyan), Modifier::BOLD.union(Modifier::UNDERLINED)),
            Tone::Confirmation => (Some(Color::Yellow), Modifier::BOLD.union(Modifier::REVERSED)),
        };
        let style = Style::new().add_modifier(modifier);
        match colour.filter(|_| self.colours) {
            Some(colour) => style.fg(colour),
            None => style,
        }
    }
}
