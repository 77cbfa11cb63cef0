//! Tests of the models, one module a subject.

mod loading;
mod models;
mod pipeline;
mod pretrained;
mod reference;
