#![forbid(unsafe_code)]
//! Derives `brimful::Batch` for structs.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Data, DeriveInput, Error, Field, Generics, Member, Result, parse_quote};

const NOT_AN_ENUM: &str = "`Batch` cannot be derived for an enum: make it a struct with `Option` \
    fields, or implement `brimful::Batch` by hand (its documentation shows how)";
const NOT_A_UNION: &str = "`Batch` cannot be derived for a union: make it a struct";

/// Implements `Batch` for a struct, by cutting and joining its fields. Each field must be a batch.
///
/// A field with `#[batch(shared)]` is the same for every micro-batch, as if it were in `Shared`. Type
/// parameters must be batches too. Enums and unions are refused.
#[proc_macro_derive(Batch, attributes(batch))]
pub fn derive_batch(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}

fn expand(input: &DeriveInput) -> Result<TokenStream> {
    if let Some(attribute) = batch_attributes(&input.attrs).next() {
        return Err(Error::new_spanned(attribute, "`#[batch(shared)]` goes above a field"));
    }
    let (members, functions) = read_fields(input)?;
    let name = &input.ident;
    let generics = with_bounds(input.generics.clone());
    let (parameters, arguments, conditions) = generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #parameters ::brimful::batch::Batch for #name #arguments #conditions {
            fn visit<'__leaf>(
                &'__leaf self,
                __f: &mut dyn ::core::ops::FnMut(::brimful::batch::Leaf<'__leaf>),
            ) {
                #(::brimful::batch::Batch::visit(&self.#members, #functions);)*
            }

            fn map(
                &self,
                __f: &mut dyn ::core::ops::FnMut(
                    ::brimful::batch::Leaf<'_>,
                ) -> ::brimful::Result<::brimful::tch::Tensor>,
            ) -> ::brimful::Result<Self> {
                ::core::result::Result::Ok(Self {
                    #(#members: ::brimful::batch::Batch::map(&self.#members, #functions)?,)*
                })
            }

            fn outline(&self, __f: &mut dyn ::core::ops::FnMut(&dyn ::core::fmt::Display)) {
                #(::brimful::batch::Batch::outline(&self.#members, __f);)*
            }

            fn blank() -> ::core::option::Option<Self> {
                ::core::option::Option::Some(Self {
                    #(#members: ::brimful::batch::Batch::blank()?,)*
                })
            }
        }
    })
}

/// Returns the names of the fields, and for each field the function that receives its leaves.
fn read_fields(input: &DeriveInput) -> Result<(Vec<Member>, Vec<TokenStream>)> {
    let fields = match &input.data {
        Data::Struct(data) => &data.fields,
        Data::Enum(data) => return Err(Error::new_spanned(data.enum_token, NOT_AN_ENUM)),
        Data::Union(data) => return Err(Error::new_spanned(data.union_token, NOT_A_UNION)),
    };
    let functions = fields.iter().map(|field| {
        Ok(if is_shared(field)? { quote!(&mut |leaf| __f(leaf.shared())) } else { quote!(__f) })
    });
    Ok((fields.members().collect(), functions.collect::<Result<_>>()?))
}

fn is_shared(field: &Field) -> Result<bool> {
    let mut shared = false;
    for attribute in batch_attributes(&field.attrs) {
        attribute.parse_nested_meta(|word| {
            shared = word.path.is_ident("shared");
            if shared { Ok(()) } else { Err(word.error("unknown: write `#[batch(shared)]`")) }
        })?;
    }
    Ok(shared)
}

fn batch_attributes(attributes: &[Attribute]) -> impl Iterator<Item = &Attribute> {
    attributes.iter().filter(|attribute| attribute.path().is_ident("batch"))
}

fn with_bounds(mut generics: Generics) -> Generics {
    for parameter in generics.type_params_mut() {
        parameter.bounds.push(parse_quote!(::brimful::batch::Batch));
    }
    generics
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(input: &DeriveInput) -> String {
        expand(input).expect_err("refused").to_string()
    }

    #[test]
    fn what_is_no_struct_is_refused_with_a_way_out() {
        let an_enum = refusal(&parse_quote!(
            enum AnEnum {
                Text(Tensor),
                Image(Tensor),
            }
        ));
        assert!(an_enum.contains("an enum: make it a struct with `Option` fields"), "{an_enum}");
        let a_union = refusal(&parse_quote!(union AUnion { text: Tensor }));
        assert!(a_union.contains("a union: make it a struct"), "{a_union}");
    }

    #[test]
    fn other_words_and_other_places_are_refused() {
        let word = refusal(&parse_quote!(
            struct UnknownWord {
                #[batch(whole)]
                text: Tensor,
            }
        ));
        assert_eq!(word, "unknown: write `#[batch(shared)]`");
        let bare = refusal(&parse_quote!(
            struct NoWord {
                #[batch]
                text: Tensor,
            }
        ));
        assert!(bare.contains("#[batch(...)]"), "{bare}");
        let place = refusal(&parse_quote!(
            #[batch(shared)]
            struct AboveTheStruct {
                text: Tensor,
            }
        ));
        assert_eq!(place, "`#[batch(shared)]` goes above a field");
    }
}
