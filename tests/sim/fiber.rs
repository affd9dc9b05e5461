//! A thread of a simulated process. It runs until it waits for something, and continues from there
//! when it is resumed.

use std::{cell::Cell, cell::RefCell, ptr};

use corosensei::{
    Coroutine, CoroutineResult, Yielder,
    stack::{DefaultStack, Stack as _},
};

/// Size of a stack: several times what the deepest call of the library needs in an unoptimised
/// build.
const STACK_BYTES: usize = 512 << 10;

thread_local! {
    /// The fiber that runs on this thread.
    static RUNNING: Cell<*const Yielder<(), ()>> = const { Cell::new(ptr::null()) };
    /// Stacks of fibers that have ended. Reused because mapping memory takes longer than a small
    /// run.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

pub(crate) struct Fiber(Option<Coroutine<(), (), ()>>);

impl Fiber {
    pub(crate) fn new(run: impl FnOnce() + 'static) -> Fiber {
        let stack = STACKS.with(|stacks| stacks.borrow_mut().pop());
        let stack =
            stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a stack"));
        debug_assert!(stack.base().get() - stack.limit().get() >= STACK_BYTES);
        Fiber(Some(Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
            RUNNING.set(yielder);
            run();
        })))
    }

    /// Runs until the fiber waits; returns true once it has ended.
    pub(crate) fn resume(&mut self) -> bool {
        let Some(coroutine) = &mut self.0 else { return true };
        let outer = RUNNING.get();
        let result = coroutine.resume(());
        RUNNING.set(outer);
        if let (CoroutineResult::Return(()), Some(coroutine)) =
            (result, self.0.take_if(|fiber| fiber.done()))
        {
            STACKS.with(|stacks| stacks.borrow_mut().push(coroutine.into_stack()));
            return true;
        }
        false
    }
}

impl Drop for Fiber {
    fn drop(&mut self) {
        // A fiber that has not ended cannot be unwound, because it may be anywhere in its code.
        std::mem::forget(self.0.take());
    }
}

/// Suspends the running fiber until it is resumed.
pub(crate) fn suspend() {
    let yielder = RUNNING.get();
    assert!(!yielder.is_null(), "only a fiber can wait");
    // SAFETY: the pointer was set by the fiber that is running now, whose body borrows the yielder
    // until it ends. Everything that can resume another fiber on this thread restores the pointer.
    #[expect(
        unsafe_code,
        reason = "otherwise all calls of the library would need a handle to the scheduler"
    )]
    let yielder = unsafe { &*yielder };
    yielder.suspend(());
    RUNNING.set(yielder);
}
