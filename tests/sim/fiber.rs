//! A thread of a simulated process: runs until it waits for something, and goes on from there when it is resumed.

use std::{cell::Cell, cell::RefCell, ptr};

use corosensei::{
    Coroutine, CoroutineResult, Yielder,
    stack::{DefaultStack, Stack as _},
};

/// What the deepest call of the library in an unoptimised build takes, several times over.
const STACK_BYTES: usize = 512 << 10;

thread_local! {
    /// The fiber that runs on this thread.
    static RUNNING: Cell<*const Yielder<(), ()>> = const { Cell::new(ptr::null()) };
    /// Stacks of fibers that have ended: mapping memory costs more than a whole small run.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

pub(crate) struct Fiber(Option<Coroutine<(), (), ()>>);

impl Fiber {
    pub(crate) fn new(run: impl FnOnce() + 'static) -> Fiber {
        let stack = STACKS.with(|stacks| stacks.borrow_mut().pop());
        let stack = stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("there is room for a stack"));
        debug_assert!(stack.base().get() - stack.limit().get() >= STACK_BYTES);
        Fiber(Some(Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
            RUNNING.set(yielder);
            run();
        })))
    }

    /// Runs until it waits; true when it has ended.
    pub(crate) fn resume(&mut self) -> bool {
        let Some(coroutine) = &mut self.0 else { return true };
        let outer = RUNNING.get();
        let result = coroutine.resume(());
        RUNNING.set(outer);
        if let (CoroutineResult::Return(()), Some(coroutine)) = (result, self.0.take_if(|fiber| fiber.done())) {
            STACKS.with(|stacks| stacks.borrow_mut().push(coroutine.into_stack()));
            return true;
        }
        false
    }
}

impl Drop for Fiber {
    fn drop(&mut self) {
        // What did not end cannot be unwound: it may be in the middle of anything.
        std::mem::forget(self.0.take());
    }
}

/// The running fiber waits until it is resumed.
pub(crate) fn suspend() {
    let yielder = RUNNING.get();
    assert!(!yielder.is_null(), "only fibers wait");
    // SAFETY: it was set by the fiber that is running now, whose body borrows it until it ends, and everything that can
    // resume another fiber on this thread puts it back.
    #[expect(unsafe_code, reason = "the library is not to carry a handle to its scheduler through all calls")]
    let yielder = unsafe { &*yielder };
    yielder.suspend(());
    RUNNING.set(yielder);
}
