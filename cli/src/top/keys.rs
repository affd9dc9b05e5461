//! From keys to what they mean, which depends on what is open. Pure.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What keys go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The table.
    Browse,
    /// The line in which a filter is written.
    Filter,
    /// One lock.
    Inspect,
    /// The question whether to release a lock.
    Ask,
    Help,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Move(Step),
    NextColumn,
    Reverse,
    Filter,
    Type(char),
    RubOut,
    /// Forget the filter.
    Clear,
    /// Keep the filter, and leave its line.
    Accept,
    Inspect,
    Release,
    Yes,
    No,
    Pause,
    Slower,
    Faster,
    Help,
    /// Close what is open; at the table, end.
    Back,
    Quit,
    Interrupt,
    Suspend,
    Redraw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

pub(crate) fn action(mode: Mode, key: KeyEvent) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match (mode, key.code) {
            (_, KeyCode::Char('c')) => Some(Action::Interrupt),
            (_, KeyCode::Char('z')) => Some(Action::Suspend),
            (_, KeyCode::Char('l')) => Some(Action::Redraw),
            (Mode::Filter, KeyCode::Char('u')) => Some(Action::Clear),
            // What terminals send for the key that rubs out.
            (Mode::Filter, KeyCode::Char('h')) => Some(Action::RubOut),
            // Whatever is not a clear yes is a no.
            (Mode::Ask, _) => Some(Action::No),
            _ => None,
        };
    }
    match mode {
        Mode::Browse => browse(key.code),
        Mode::Filter => filter(key.code),
        Mode::Inspect => inspect(key.code),
        Mode::Ask => Some(if key.code == KeyCode::Char('y') { Action::Yes } else { Action::No }),
        Mode::Help => Some(Action::Back),
    }
}

fn browse(key: KeyCode) -> Option<Action> {
    Some(match key {
        KeyCode::Char('s') => Action::NextColumn,
        KeyCode::Char('r') => Action::Reverse,
        KeyCode::Char('/') => Action::Filter,
        KeyCode::Enter => Action::Inspect,
        KeyCode::Char('f' | 'F') => Action::Release,
        KeyCode::Char('p') => Action::Pause,
        KeyCode::Char('+') => Action::Slower,
        KeyCode::Char('-') => Action::Faster,
        KeyCode::Char('?' | 'h') => Action::Help,
        KeyCode::Char('q') => Action::Quit,
        KeyCode::Esc => Action::Back,
        key => return step(key).map(Action::Move),
    })
}

fn filter(key: KeyCode) -> Option<Action> {
    Some(match key {
        KeyCode::Char(letter) => Action::Type(letter),
        KeyCode::Backspace => Action::RubOut,
        KeyCode::Enter => Action::Accept,
        KeyCode::Esc => Action::Back,
        key => return step(key).map(Action::Move),
    })
}

fn inspect(key: KeyCode) -> Option<Action> {
    Some(match key {
        KeyCode::Char('f' | 'F') => Action::Release,
        KeyCode::Char('q') | KeyCode::Esc | KeyCode::Enter => Action::Back,
        key => return step(key).map(Action::Move),
    })
}

fn step(key: KeyCode) -> Option<Step> {
    Some(match key {
        KeyCode::Up | KeyCode::Char('k') => Step::Up,
        KeyCode::Down | KeyCode::Char('j') => Step::Down,
        KeyCode::PageUp => Step::PageUp,
        KeyCode::PageDown => Step::PageDown,
        KeyCode::Home | KeyCode::Char('g') => Step::Home,
        KeyCode::End | KeyCode::Char('G') => Step::End,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(mode: Mode, code: KeyCode) -> Option<Action> {
        action(mode, KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn only_a_small_y_says_yes() {
        assert_eq!(plain(Mode::Ask, KeyCode::Char('y')), Some(Action::Yes));
        for code in [KeyCode::Enter, KeyCode::Esc, KeyCode::Up, KeyCode::F(1)] {
            assert_eq!(plain(Mode::Ask, code), Some(Action::No), "{code:?}");
        }
        for letter in ('\0'..='\u{ff}').filter(|letter| *letter != 'y') {
            assert_eq!(plain(Mode::Ask, KeyCode::Char(letter)), Some(Action::No), "{letter:?}");
        }
        let with = |modifiers| action(Mode::Ask, KeyEvent::new(KeyCode::Char('y'), modifiers));
        assert_eq!(with(KeyModifiers::CONTROL), Some(Action::No));
    }

    #[test]
    fn control_keys_mean_the_same_everywhere() {
        for mode in [Mode::Browse, Mode::Filter, Mode::Inspect, Mode::Ask, Mode::Help] {
            for (letter, meaning) in [('c', Action::Interrupt), ('z', Action::Suspend), ('l', Action::Redraw)] {
                let key = KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
                assert_eq!(action(mode, key), Some(meaning), "{mode:?}");
            }
        }
    }

    #[test]
    fn letters_belong_to_the_filter_while_it_is_written() {
        for letter in ['q', 'f', 'y', 'j', '/', '+', '漢'] {
            assert_eq!(plain(Mode::Filter, KeyCode::Char(letter)), Some(Action::Type(letter)));
        }
        assert_eq!(plain(Mode::Filter, KeyCode::Down), Some(Action::Move(Step::Down)));
        assert_eq!(plain(Mode::Filter, KeyCode::Esc), Some(Action::Back));
    }

    #[test]
    fn every_key_of_the_table_means_something_of_its_own() {
        let letters = ['s', 'r', '/', 'f', 'p', '+', '-', '?', 'q', 'j', 'k'];
        let meanings: Vec<_> =
            letters.iter().filter_map(|letter| plain(Mode::Browse, KeyCode::Char(*letter))).collect();
        assert_eq!(meanings.len(), letters.len());
        for (at, meaning) in meanings.iter().enumerate() {
            assert!(!meanings[..at].contains(meaning), "{meaning:?}");
        }
        assert_eq!(plain(Mode::Browse, KeyCode::Char('F')), Some(Action::Release));
        assert_eq!(plain(Mode::Browse, KeyCode::Char('x')), None);
    }

    #[test]
    fn a_key_that_is_let_go_means_nothing() {
        let key = KeyEvent::new_with_kind(KeyCode::Char('y'), KeyModifiers::NONE, KeyEventKind::Release);
        assert_eq!(action(Mode::Ask, key), None);
    }
}
