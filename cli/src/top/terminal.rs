//! `Screen`: the terminal while it is ours, and how it is given back, whatever happens.

use std::{
    cell::Cell,
    io::{self, IsTerminal as _, Stdout, stdin, stdout},
    mem::ManuallyDrop,
    panic, process,
    sync::Once,
};

use parking_lot::ReentrantMutex;
use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor, event, execute,
        terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
    },
};

/// What Rust's own panics end a process with.
const PANICKED: i32 = 101;

/// Whether the terminal is ours. Held while something is written to it; a thread that panics in between still gets
/// in, and nobody draws after it.
static OURS: ReentrantMutex<Cell<bool>> = ReentrantMutex::new(Cell::new(false));

/// The terminal in raw mode, with a screen of its own; given back when dropped, and when any thread panics.
pub(crate) struct Screen {
    /// Never dropped: it would show the cursor too, and panic where there is nobody left to be told that it cannot.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<Stdout>>>,
}

/// Whether somebody sits there.
pub(crate) fn is_there() -> bool {
    stdin().is_terminal() && stdout().is_terminal()
}

impl Screen {
    pub(crate) fn enter() -> io::Result<Screen> {
        give_back_on_panic();
        take()?;
        let terminal = Terminal::new(CrosstermBackend::new(stdout())).inspect_err(|_| give_back())?;
        Ok(Screen { terminal: ManuallyDrop::new(terminal) })
    }

    pub(crate) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let ours = OURS.lock();
        if ours.get() {
            self.terminal.draw(draw)?;
        }
        Ok(())
    }

    /// Forgets what is on the screen, so that the next drawing draws all of it.
    pub(crate) fn clear(&mut self) -> io::Result<()> {
        // `Terminal::clear` would ask the terminal for its cursor, and the thread that reads keys would hear the answer.
        let size = self.terminal.size()?;
        self.terminal.resize(size.into())
    }

    /// Gives the terminal back for as long as `away` takes.
    pub(crate) fn lend(&mut self, away: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        give_back();
        away()?;
        take()?;
        self.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

fn take() -> io::Result<()> {
    let ours = OURS.lock();
    ours.set(true);
    // Pasted text must not be taken for keys, least of all for a yes.
    enable_raw_mode()
        .and_then(|()| execute!(stdout(), EnterAlternateScreen, event::EnableBracketedPaste, cursor::Hide))
        .inspect_err(|_| give_back())
}

/// Does nothing when the terminal is not ours. A terminal that is gone needs nothing any more.
fn give_back() {
    let ours = OURS.lock();
    if ours.replace(false) {
        let _ = execute!(stdout(), event::DisableBracketedPaste, LeaveAlternateScreen, cursor::Show);
        let _ = disable_raw_mode();
    }
}

/// Where a panic would be told, it can be read; and with a thread less, the screen would lie.
fn give_back_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let ours = OURS.lock();
            let was_ours = ours.get();
            give_back();
            tell(info);
            if was_ours {
                process::exit(PANICKED);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::{env, io::Read as _, thread};

    use portable_pty::{CommandBuilder, PtySize, native_pty_system};

    use super::*;

    /// What this test does in a process of its own, and whose terminal it is.
    const ROLE: &str = "DISTLOCK_TEST_PANIC";

    fn panics(role: &str) -> ! {
        let mut screen = Screen::enter().unwrap();
        screen.draw(|frame| frame.render_widget("picture", frame.area())).unwrap();
        match role {
            "drawing" => screen.draw(|_| panic!("on purpose")).unwrap(),
            _ => drop(thread::spawn(|| panic!("on purpose")).join()),
        }
        unreachable!("the panic ends the process");
    }

    #[test]
    fn a_panic_of_any_thread_is_told_on_a_restored_terminal() {
        if let Ok(role) = env::var(ROLE) {
            panics(&role);
        }
        for role in ["drawing", "another thread"] {
            let pty = native_pty_system().openpty(PtySize::default()).unwrap();
            let before = format!("{:?}", pty.master.get_termios());
            let mut command = CommandBuilder::new(env::current_exe().unwrap());
            let test = thread::current().name().map(str::to_owned).unwrap();
            command.args([&test, "--exact", "--nocapture"]);
            command.env(ROLE, role);
            let mut child = pty.slave.spawn_command(command).unwrap();
            drop(pty.slave);
            let (mut output, mut said) = (pty.master.try_clone_reader().unwrap(), Vec::new());
            // Linux ends it with an error.
            let _ = output.read_to_end(&mut said);
            let said = String::from_utf8_lossy(&said).into_owned();
            assert_eq!(child.wait().unwrap().exit_code(), PANICKED.unsigned_abs(), "{said}");
            let place = |text: &str| said.find(text).unwrap_or_else(|| panic!("no {text:?} in {said:?}"));
            assert!(place("picture") < place("\u{1b}[?1049l"), "{said:?}");
            assert!(
                place("\u{1b}[?1049l") < place("on purpose") && place("\u{1b}[?25h") < place("on purpose"),
                "{said:?}"
            );
            assert!(!said[place("on purpose")..].contains("picture"), "drawn over: {said:?}");
            assert_eq!(format!("{:?}", pty.master.get_termios()), before);
        }
    }
}
