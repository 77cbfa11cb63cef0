//! Building blocks of a batch: tensors, values that are not cut, and containers of tensors and values.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::{Deref, DerefMut};

use tch::Tensor;

use super::{Batch, Leaf};
use crate::Result;

type Visitor<'f, 'a> = &'f mut dyn FnMut(Leaf<'a>);
type Mapper<'f> = &'f mut dyn FnMut(Leaf<'_>) -> Result<Tensor>;
type Outliner<'f> = &'f mut dyn FnMut(&dyn Display);

impl Batch for Tensor {
    fn visit<'a>(&'a self, f: Visitor<'_, 'a>) {
        f(Leaf::Cut(self));
    }

    fn map(&self, f: Mapper<'_>) -> Result<Self> {
        f(Leaf::Cut(self))
    }

    fn blank() -> Option<Self> {
        Some(Self::new())
    }
}

/// Wrapper of a value that is whole in every micro-batch, such as class weights or a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shared<T>(pub T);

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Shared<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Batch> Batch for Shared<T> {
    fn visit<'a>(&'a self, f: Visitor<'_, 'a>) {
        self.0.visit(&mut |leaf| f(leaf.shared()));
    }

    fn map(&self, f: Mapper<'_>) -> Result<Self> {
        Ok(Self(self.0.map(&mut |leaf| f(leaf.shared()))?))
    }

    fn blank() -> Option<Self> {
        T::blank().map(Self)
    }

    fn outline(&self, f: Outliner<'_>) {
        self.0.outline(f);
    }
}

impl<B: Batch> Batch for Box<B> {
    fn visit<'a>(&'a self, f: Visitor<'_, 'a>) {
        B::visit(self, f);
    }

    fn map(&self, f: Mapper<'_>) -> Result<Self> {
        Ok(Self::new(B::map(self, f)?))
    }

    fn blank() -> Option<Self> {
        B::blank().map(Self::new)
    }

    fn outline(&self, f: Outliner<'_>) {
        B::outline(self, f);
    }
}

impl<B: Batch> Batch for Option<B> {
    fn visit<'a>(&'a self, f: Visitor<'_, 'a>) {
        self.iter().for_each(|value| value.visit(f));
    }

    fn map(&self, f: Mapper<'_>) -> Result<Self> {
        self.as_ref().map(|value| value.map(f)).transpose()
    }

    fn outline(&self, f: Outliner<'_>) {
        f(if self.is_some() { &"Some" } else { &"None" });
        self.iter().for_each(|value| value.outline(f));
    }
}

impl<B: Batch> Batch for Vec<B> {
    fn visit<'a>(&'a self, f: Visitor<'_, 'a>) {
        self.iter().for_each(|item| item.visit(f));
    }

    fn map(&self, f: Mapper<'_>) -> Result<Self> {
        self.iter().map(|item| item.map(f)).collect()
    }

    fn outline(&self, f: Outliner<'_>) {
        f(&format_args!("a Vec of {}", self.len()));
        self.iter().for_each(|item| item.outline(f));
    }
}

impl<B: Batch, const N: usize> Batch for [B; N] {
    fn visit<'a>(&'a self, f: Visitor<'_, 'a>) {
        self.iter().for_each(|item| item.visit(f));
    }

    fn map(&self, f: Mapper<'_>) -> Result<Self> {
        let items = self.iter().map(|item| item.map(f)).collect::<Result<Vec<B>>>()?;
        Ok(items.try_into().unwrap_or_else(|_| unreachable!("there are N items for N items")))
    }

    fn blank() -> Option<Self> {
        let items = (0..N).map(|_| B::blank()).collect::<Option<Vec<B>>>()?;
        items.try_into().ok()
    }

    fn outline(&self, f: Outliner<'_>) {
        self.iter().for_each(|item| item.outline(f));
    }
}

/// `BTreeMap` only, because the items of a `HashMap` would have another order in every micro-batch.
impl<K: Clone + Ord + Display + Send, B: Batch> Batch for BTreeMap<K, B> {
    fn visit<'a>(&'a self, f: Visitor<'_, 'a>) {
        self.values().for_each(|value| value.visit(f));
    }

    fn map(&self, f: Mapper<'_>) -> Result<Self> {
        self.iter().map(|(key, value)| Ok((key.clone(), value.map(f)?))).collect()
    }

    fn outline(&self, f: Outliner<'_>) {
        f(&format_args!("a map of {}", self.len()));
        for (key, value) in self {
            f(&format_args!("the key {key}"));
            value.outline(f);
        }
    }
}

/// Implements `Batch` for values without a tensor: every micro-batch has a copy.
macro_rules! values {
    ($($value:ty)*) => {$(
        impl Batch for $value {
            fn visit<'a>(&'a self, _: Visitor<'_, 'a>) {}

            fn map(&self, _: Mapper<'_>) -> Result<Self> {
                Ok(self.clone())
            }

            fn outline(&self, f: Outliner<'_>) {
                f(self);
            }
        }
    )*};
}

values!(bool char String f32 f64);
values!(i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize);

macro_rules! tuple {
    ($($item:ident $position:tt)*) => {
        impl<$($item: Batch),*> Batch for ($($item,)*) {
            fn visit<'a>(&'a self, _f: Visitor<'_, 'a>) {
                $(self.$position.visit(_f);)*
            }

            fn map(&self, _f: Mapper<'_>) -> Result<Self> {
                Ok(($(self.$position.map(_f)?,)*))
            }

            fn outline(&self, _f: Outliner<'_>) {
                $(self.$position.outline(_f);)*
            }

            fn blank() -> Option<Self> {
                Some(($($item::blank()?,)*))
            }
        }
    };
}

tuple!();
tuple!(A 0);
tuple!(A 0 B 1);
tuple!(A 0 B 1 C 2);
tuple!(A 0 B 1 C 2 D 3);
tuple!(A 0 B 1 C 2 D 3 E 4);
tuple!(A 0 B 1 C 2 D 3 E 4 F 5);
tuple!(A 0 B 1 C 2 D 3 E 4 F 5 G 6);
tuple!(A 0 B 1 C 2 D 3 E 4 F 5 G 6 H 7);
