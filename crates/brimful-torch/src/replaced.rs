//! Values that a thread's guards have replaced, restored in whatever order the guards are dropped.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::thread::LocalKey;

/// Values that the living guards of one kind have replaced, the outermost first.
#[derive(Debug)]
pub(crate) struct Replaced<T>(RefCell<Vec<(u64, T)>>);

/// Number of a guard on its thread, which the guard cannot leave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuardNumber(u64, PhantomData<*const ()>);

impl<T: Copy> Replaced<T> {
    pub(crate) const fn new() -> Self {
        Self(RefCell::new(Vec::new()))
    }

    /// Records the value that a new guard has replaced.
    pub(crate) fn note(list: &'static LocalKey<Self>, found: T) -> GuardNumber {
        list.with(|this| {
            let mut all = this.0.borrow_mut();
            // Higher than all existing numbers.
            let number = all.last().map_or(0, |(last, _)| last + 1);
            all.push((number, found));
            GuardNumber(number, PhantomData)
        })
    }

    /// Returns whether a guard is alive.
    pub(crate) fn is_noted(list: &'static LocalKey<Self>) -> bool {
        list.with(|this| !this.0.borrow().is_empty())
    }

    /// Removes a guard and returns the value to restore: none if a later guard of the same setting still lives
    /// and will restore it instead.
    pub(crate) fn leave(
        list: &'static LocalKey<Self>,
        guard: GuardNumber,
        same: impl Fn(&T, &T) -> bool,
    ) -> Option<T> {
        // A thread whose list is gone is ending and needs no restoring.
        let left = list.try_with(|this| {
            let mut all = this.0.borrow_mut();
            let at = all.iter().position(|(number, _)| *number == guard.0)?;
            let (_, found) = all.remove(at);
            match all[at..].iter_mut().find(|(_, later)| same(later, &found)) {
                Some((_, later)) => {
                    *later = found;
                    None
                }
                None => Some(found),
            }
        });
        left.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static FOUND: Replaced<(char, i32)> = const { Replaced::new() };
    }

    fn leave(guard: GuardNumber) -> Option<(char, i32)> {
        Replaced::leave(&FOUND, guard, |a, b| a.0 == b.0)
    }

    #[test]
    fn what_was_first_found_is_put_back_by_the_last_to_go() {
        let [a1, b1, a2, a3] =
            [('a', 0), ('b', 10), ('a', 1), ('a', 2)].map(|found| Replaced::note(&FOUND, found));
        assert_eq!(leave(a2), None, "a later one holds");
        assert_eq!(leave(a1), None);
        assert_eq!(leave(b1), Some(('b', 10)), "of another thing");
        assert_eq!(leave(a3), Some(('a', 0)));
        assert_eq!(leave(a3), None);
    }

    #[test]
    fn in_order_each_puts_back_what_it_found() {
        let [first, second] = [('a', 0), ('a', 1)].map(|found| Replaced::note(&FOUND, found));
        assert_eq!(leave(second), Some(('a', 1)));
        assert_eq!(leave(first), Some(('a', 0)));
    }
}
