//! The guards that dereference to `LockGuard`.

/// Defines a guard that dereferences to [`LockGuard`](super::LockGuard).
macro_rules! guard_type {
    ($(#[$attribute:meta])* $name:ident) => {
        $(#[$attribute])*
        #[derive(Debug)]
        pub struct $name($crate::LockGuard);

        impl $name {
            /// Releases what this guard holds and returns the outcome. See
            /// [`LockGuard::release`](crate::LockGuard::release).
            ///
            /// # Errors
            ///
            /// As for [`LockGuard::release`](crate::LockGuard::release).
            pub fn release(self) -> $crate::Result<$crate::Released> {
                self.0.release()
            }

            /// Leaves what this guard holds to a successor. See
            /// [`LockGuard::detach`](crate::LockGuard::detach).
            ///
            /// # Errors
            ///
            /// As for [`LockGuard::detach`](crate::LockGuard::detach).
            pub fn detach(self) -> $crate::Result<$crate::Detached> {
                self.0.detach()
            }

            /// Releases in the background. See
            /// [`LockGuard::release_later`](crate::LockGuard::release_later).
            pub fn release_later(self) {
                self.0.release_later();
            }
        }

        impl From<$name> for $crate::LockGuard {
            fn from(guard: $name) -> $crate::LockGuard {
                guard.0
            }
        }

        impl std::ops::Deref for $name {
            type Target = $crate::LockGuard;

            fn deref(&self) -> &$crate::LockGuard {
                &self.0
            }
        }
    };
}

pub(crate) use guard_type;
